"""Generating under a plan, and the statistics of it."""
