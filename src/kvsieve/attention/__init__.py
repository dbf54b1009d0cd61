"""Attention over stored entries. `reference` is the slow definition that every fast path is tested against."""

from kvsieve.attention.dense import dense_attention
from kvsieve.attention.latent import UpProjection, latent_attention
from kvsieve.attention.masked import masked_attention
from kvsieve.attention.packed import packed_attention
from kvsieve.attention.paged import CompiledReading, why_not_compiled
from kvsieve.attention.prompt import prompt_attention
from kvsieve.attention.ragged import ragged_attention
from kvsieve.attention.sparse import sparse_attention
from kvsieve.attention.windowed import Window, window_attention

__all__ = [
    "CompiledReading",
    "UpProjection",
    "Window",
    "dense_attention",
    "latent_attention",
    "masked_attention",
    "packed_attention",
    "prompt_attention",
    "ragged_attention",
    "sparse_attention",
    "why_not_compiled",
    "window_attention",
]
