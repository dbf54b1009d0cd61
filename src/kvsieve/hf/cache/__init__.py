"""The cache that transformers sees, and the records of what happened on it."""
