"""Stores of keys and values. Pure torch; the adapters that transformers sees are in kvsieve.hf.cache."""

from kvsieve.cache.base import Store
from kvsieve.cache.latent import LatentStore
from kvsieve.cache.ragged import RaggedStore, keep
from kvsieve.cache.row_groups import RowGroups, View, group_rows
from kvsieve.cache.store import DenseStore

__all__ = ["DenseStore", "LatentStore", "RaggedStore", "RowGroups", "Store", "View", "group_rows", "keep"]
