"""Attention over stored entries. `reference` is the slow definition; every fast path is tested against it."""

from kvsieve.attention.dense import dense_attention
from kvsieve.attention.ragged import ragged_attention
from kvsieve.attention.sparse import sparse_attention

__all__ = ["dense_attention", "ragged_attention", "sparse_attention"]
