"""KV bytes that decoding reads, layers that transformers keeps itself included."""

from __future__ import annotations

from typing import Any

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.hf.generate.stats import Stats


def read_bytes(stats: Stats, cache: SieveCache) -> int:
    """Bytes that a token of all rows reads on average: what was touched, and transformers' own sliding windows."""
    windows: list[Any] = [layer for layer in cache.layers if not isinstance(layer, SieveLayer)]
    own = sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in windows)
    read = stats.traffic
    return (
        own if read is None else own + cache.conversation.batch * (read.bytes + read.estimate_bytes + read.upkeep_bytes)
    )
