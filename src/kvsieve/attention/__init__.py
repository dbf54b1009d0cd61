"""Attention over stored entries. `reference` is the slow definition that every fast path is tested against."""

from kvsieve.attention.dense import dense_attention
from kvsieve.attention.masked import masked_attention
from kvsieve.attention.ragged import ragged_attention
from kvsieve.attention.sparse import sparse_attention

__all__ = ["dense_attention", "masked_attention", "ragged_attention", "sparse_attention"]
