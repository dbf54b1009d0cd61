"""Parts of a layer's entries: slots, or a row's real ones."""

from __future__ import annotations

from torch import Tensor

from kvsieve.attention.request import DenseEntries


def between(stored: DenseEntries, first: int, last: int) -> DenseEntries:
    """Return the entries in slots first ... last - 1, all of them taken as real."""
    weights = None if stored.log_weight is None else stored.log_weight[:, :, first:last]
    return DenseEntries(stored.keys[:, :, first:last], stored.values[:, :, first:last], log_weight=weights)


def real_row(stored: DenseEntries, row: int, real: Tensor) -> DenseEntries:
    """Return the entries of one row where bool `real` [N] is True."""
    keys, values = (real_entries(part[row], real)[None] for part in (stored.keys, stored.values))
    weights = None if stored.log_weight is None else real_entries(stored.log_weight[row], real)[None]
    return DenseEntries(keys, values, log_weight=weights)


def real_entries(part: Tensor, real: Tensor) -> Tensor:
    """Take the entries of [heads, L, ...] where `real`; a view where those are the last ones."""
    count = int(real.sum())
    if bool(real[-count:].all()):
        return part[:, -count:]
    return part[:, real]
