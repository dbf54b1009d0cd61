"""Storage of keys and values. Pure torch; the adapters for transformers are in kvsieve.hf.cache."""

from kvsieve.cache.contract import LayerMemory as LayerMemory
from kvsieve.cache.contract import View as View
from kvsieve.cache.fixed import FixedEntries as FixedEntries
from kvsieve.cache.keep import encode as encode
from kvsieve.cache.keep import keep as keep
from kvsieve.cache.keep import quantize_evicted as quantize_evicted
from kvsieve.cache.latent import LatentStore as LatentStore
from kvsieve.cache.packed import PackedStore as PackedStore
from kvsieve.cache.ragged import RaggedStore as RaggedStore
from kvsieve.cache.row_groups import RowGroups as RowGroups
from kvsieve.cache.row_groups import group_rows as group_rows
from kvsieve.cache.store import DenseStore as DenseStore
