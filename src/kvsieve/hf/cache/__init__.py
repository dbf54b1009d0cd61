"""The cache for transformers, and its records."""
