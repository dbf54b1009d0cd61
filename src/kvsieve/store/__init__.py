"""Prefix cache: stored prompt prefixes, in memory and on disk."""

from __future__ import annotations

from kvsieve.store.node import NodeInfo
from kvsieve.store.prefix_store import Found, PrefixStore
from kvsieve.store.stats import StoreStats

__all__ = ["Found", "NodeInfo", "PrefixStore", "StoreStats"]
