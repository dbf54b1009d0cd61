"""Masking in place of evicting, which must give the same."""

from __future__ import annotations

import torch

from kvsieve.cache import DenseStore
from kvsieve.types import Selection


def mask_instead(store: DenseStore, selection: Selection, reserve: int = 0, reuse: bool = False) -> None:
    """What evicting must equal: the same entries stay, the others are only hidden."""
    shape = (*selection.indices.shape[:2], store.capacity)
    valid = torch.zeros(shape, dtype=torch.bool)
    real = selection.real()
    source = torch.ones_like(selection.indices, dtype=torch.bool)
    source = source if real is None else source & real[:, None]
    valid.scatter_(2, selection.indices, source)
    valid[:, :, store.size :] = True
    store.columns = store.columns.including(valid=valid)
    store.lengths = selection.lengths or (selection.indices.shape[2],) * shape[0]
