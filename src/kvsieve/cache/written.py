"""Keys, values and weights that an evictor writes into the entries it keeps."""

from __future__ import annotations

from torch import Tensor

from kvsieve.cache.columns import Columns
from kvsieve.types import Selection


def written(columns: Columns, selection: Selection, real: Tensor | None) -> Columns:
    """Return columns with the parts of a selection in their first K slots; the buffers are written in place.

    Args:
        columns: [B, H, slots, ...], the entries at ``selection.indices`` first.
        selection: with parts [B, H, K, ...].
        real: bool [B, 1 or H, K], False for filler, which becomes 0; None without filler.
    """
    if selection.log_weight is not None:
        columns = columns.with_log_weight()
    for name, part in parts_of(selection).items():
        buffer = columns[name]
        numbers = part.to(buffer.dtype)
        if real is not None:
            numbers = numbers.masked_fill(~(real if numbers.ndim == real.ndim else real[..., None]), 0)
        buffer[:, :, : numbers.shape[2]] = numbers
    return columns


def parts_of(selection: Selection) -> dict[str, Tensor]:
    """Return the written parts of a selection by the columns' names."""
    parts = {"keys": selection.keys, "values": selection.values, "log_weight": selection.log_weight}
    return {name: part for name, part in parts.items() if part is not None}
