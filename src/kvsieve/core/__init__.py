"""Tensor functions that methods are made of: scoring, pooling, selection. Imports only torch, by kvsieve.lazy."""
