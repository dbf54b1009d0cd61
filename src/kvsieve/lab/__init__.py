"""Measuring: evaluation, tasks, benchmarks, calibration, advice, clients."""
