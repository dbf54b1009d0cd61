"""Bytes of the cache that decode reads, including layers that no plan reduces."""

from __future__ import annotations

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.generate.stats import Stats


def read_bytes(stats: Stats, cache: SieveCache) -> int:
    """Return the mean bytes that a token of all rows reads: entries, sliding windows and recurrent states."""
    own = 0
    for layer in cache.all_layers:
        memory = layer.memory
        if layer.window is not None and memory is not None and not memory.is_empty:
            own += memory.keys.nbytes + memory.values.nbytes
        own += sum(state.nbytes for state in layer.state_tensors())
    read = stats.traffic
    return (
        own if read is None else own + cache.conversation.batch * (read.bytes + read.estimate_bytes + read.upkeep_bytes)
    )
