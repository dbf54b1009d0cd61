"""Measuring: what every result file says about where it was measured."""

from kvsieve.bench.environment import environment

__all__ = ["environment"]
