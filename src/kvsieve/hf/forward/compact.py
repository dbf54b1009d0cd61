"""Reordering of a pass's columns so that padding precedes the tokens of each row: methods see no other padding.

A mask may hide tokens between others. Attention handles that, but the last queries of a pass, blocks of a prompt and
chunks count slots. So a pass runs with its columns reordered; store and session know them by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Arguments of a decoder with columns, and their dimension; position ids have them last.
_COLUMNS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "token_type_ids": 1}


def holes(mask: Tensor) -> Tensor:
    """Return bool [B, L - 1]: True for padding after a token of a mask, bool [B, L]."""
    return mask[:, :-1] & ~mask[:, 1:]


def has_holes(mask: Tensor) -> bool:
    """Return True if padding follows a token in some row of a mask, bool [B, L]. Synchronizes with the device."""
    return bool(holes(mask).any())


def columns_of(
    mask: Tensor | None, start: int, sizes: Sequence[int], device: Any, *, holed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the columns of passes in their order, int64 [1 or B, L], and the mask of tokens.

    Args:
        mask: bool [B, columns] of the conversation; None without padding.
        start: columns before the first pass.
        sizes: columns of each pass.
        device: of the result.
        holed: False if no row has padding after a token of its pass, and no column moves.
    """
    end = start + sum(sizes)
    if mask is None or not holed:
        return torch.arange(start, end, device=device)[None], None if mask is None else mask[:, start:end]
    parts = []
    for size in sizes:
        # Each row's padding first, and its tokens in order.
        parts.append(start + mask[:, start : start + size].to(torch.uint8).argsort(dim=-1, stable=True))
        start += size
    columns = torch.cat(parts, 1)
    return columns, mask.gather(1, columns)


def reordered(call: dict[str, Any], order: Tensor | None, start: int, names: Sequence[str]) -> dict[str, Any]:
    """Return a decoder's arguments with the columns of the pass reordered.

    Args:
        call: the arguments, by name.
        order: int64 [B, L], the columns, counted within the pass; None for no change.
        start: columns before the pass.
        names: parameters of the decoder.
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
    """Return hidden states [B, L, C] of a pass in the caller's order."""
    return _moved(hidden, order.argsort(-1), 1)


def _moved(value: Tensor, order: Tensor, dim: int) -> Tensor:
    """Gather columns of [B, L], [B, L, C], or of whole numbers [A, B, L]."""
    order = order.to(value.device)
    if dim == -1:
        return value.expand(*value.shape[:-2], len(order), -1).gather(-1, order.expand(*value.shape[:-2], -1, -1))
    index = order.view(*order.shape, *(1 for _ in value.shape[2:])).expand(-1, -1, *value.shape[2:])
    return value.expand(len(order), *value.shape[1:]).gather(1, index)
