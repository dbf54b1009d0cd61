"""Evaluation: from a model and a list of methods to scores, plots and a report."""
