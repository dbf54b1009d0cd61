"""Benchmarks of speed and memory: kvsieve, plain transformers and kvpress side by side, and estimates."""
