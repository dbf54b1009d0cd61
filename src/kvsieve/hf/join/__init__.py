"""Joins of documents: entries of documents that were prefilled alone become one prompt's cache."""
