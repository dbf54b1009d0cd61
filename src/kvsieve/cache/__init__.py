"""Where keys and values live. Pure torch; the adapters that transformers sees are in kvsieve.hf.cache."""

from kvsieve.cache.store import DenseStore

__all__ = ["DenseStore"]
