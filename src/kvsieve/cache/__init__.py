"""Storage of keys and values. Pure torch; the adapters for transformers are in kvsieve.hf.cache."""

from kvsieve.cache.contract import LayerMemory, View
from kvsieve.cache.fixed import FixedEntries
from kvsieve.cache.keep import encode, keep, quantize_evicted
from kvsieve.cache.latent import LatentStore
from kvsieve.cache.packed import PackedStore
from kvsieve.cache.ragged import RaggedStore
from kvsieve.cache.row_groups import RowGroups, group_rows
from kvsieve.cache.store import DenseStore

__all__ = [
    "DenseStore",
    "FixedEntries",
    "LatentStore",
    "LayerMemory",
    "PackedStore",
    "RaggedStore",
    "RowGroups",
    "View",
    "encode",
    "group_rows",
    "keep",
    "quantize_evicted",
]
