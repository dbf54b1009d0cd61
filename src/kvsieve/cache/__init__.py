"""Where keys and values live. Pure torch; the adapters that transformers sees are in kvsieve.hf.cache."""

from kvsieve.cache.base import Store
from kvsieve.cache.lines import Grouped, View, group_lines
from kvsieve.cache.ragged import RaggedStore, keep
from kvsieve.cache.store import DenseStore

__all__ = ["DenseStore", "Grouped", "RaggedStore", "Store", "View", "group_lines", "keep"]
