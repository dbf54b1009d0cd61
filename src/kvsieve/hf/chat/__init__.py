"""Conversations on one cache."""
