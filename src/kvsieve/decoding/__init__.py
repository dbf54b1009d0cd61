"""Decoding: one loop for the server, the evaluation and the calibration, with sampling and answers."""
