"""Evaluation of methods on a model: scores, plots and a report."""
