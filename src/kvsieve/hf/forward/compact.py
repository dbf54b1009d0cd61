"""Padding of a pass put in front of its tokens, row by row: methods are shown it nowhere else.

A mask may hide tokens between others. Attention minds that, but the last queries of a pass, blocks of a prompt and
chunks count slots. So a pass is run in another order of its columns, which store and session know by their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Arguments of a decoder that have columns, and the dimension of these; position ids have them last.
_COLUMNS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "token_type_ids": 1}


def holes(mask: Tensor) -> Tensor:
    """bool [B, L - 1]: where padding stands behind a token of a mask, bool [B, L]."""
    return mask[:, :-1] & ~mask[:, 1:]


def has_holes(mask: Tensor) -> bool:
    """Tell whether padding stands behind a token in some row of a mask, bool [B, L]. The host waits for it."""
    return bool(holes(mask).any())


def compact_order(mask: Tensor) -> Tensor:
    """Return the order of columns, int64 [B, L], that has each row's padding first and its tokens as they come."""
    return mask.to(torch.uint8).argsort(dim=-1, stable=True)


def columns_of(
    mask: Tensor | None, start: int, sizes: Sequence[int], device: Any, *, holed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the columns of passes in their order, int64 [1 or B, L], and which are tokens.

    Args:
        mask: bool [B, columns] of the conversation; None where nothing is padding.
        start: columns before the first pass.
        sizes: columns of each pass.
        device: of the result.
        holed: False where no row has padding behind a token of its pass, and all columns stay where they are.
    """
    end = start + sum(sizes)
    if mask is None or not holed:
        valid = None if mask is None else mask[:, start:end]
        return torch.arange(start, end, device=device)[None], valid
    parts = []
    for size in sizes:
        parts.append(start + compact_order(mask[:, start : start + size]))
        start += size
    columns = torch.cat(parts, 1)
    return columns, mask.gather(1, columns)


def reordered(call: dict[str, Any], order: Tensor | None, start: int, names: Sequence[str]) -> dict[str, Any]:
    """Return a decoder's arguments with the columns of the pass in another order.

    Args:
        call: the arguments, by name.
        order: int64 [B, L], the columns, counted within the pass; None to leave them.
        start: columns before the pass.
        names: what the decoder takes.
    """
    if order is None:
        return call
    out = dict(call)
    if out.get("position_ids") is None and "position_ids" in names:
        out["position_ids"] = torch.arange(start, start + order.shape[1], device=order.device)[None]
    for name, dim in _COLUMNS.items():
        value = out.get(name)
        if isinstance(value, Tensor) and value.shape[dim] == order.shape[1]:
            out[name] = _moved(value, order, dim)
    mask = out.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        out["attention_mask"] = torch.cat([mask[:, :start], mask[:, start:].gather(1, order.to(mask.device))], 1)
    return out


def restored(hidden: Tensor, order: Tensor) -> Tensor:
    """Bring hidden states [B, L, C] of a pass back in the order that its caller fed."""
    return _moved(hidden, order.argsort(-1), 1)


def _moved(value: Tensor, order: Tensor, dim: int) -> Tensor:
    """Gather columns of [B, L], [B, L, C], or of whole numbers [A, B, L]."""
    order = order.to(value.device)
    if dim == -1:
        return value.expand(*value.shape[:-2], len(order), -1).gather(-1, order.expand(*value.shape[:-2], -1, -1))
    index = order.view(*order.shape, *(1 for _ in value.shape[2:])).expand(-1, -1, *value.shape[2:])
    return value.expand(len(order), *value.shape[1:]).gather(1, index)
