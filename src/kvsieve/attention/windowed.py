"""Attention of layers that look back no further than a window, or the beginning of a chunk, given by positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvsieve.attention.request import AttentionRequest, DenseEntries, Executor, Near, Shown, each_of, why_not_padded
from kvsieve.attention.slices import between, real_entries, real_row

# Queries of a block; its keys are as many and a window's.
_QUERIES = 512

_Request = AttentionRequest[DenseEntries, Near]
_Attend = Callable[[AttentionRequest[DenseEntries, Any]], Tensor]


def _why_not_rows(request: _Request) -> str | None:
    return None if request.stored.valid is not None else "there is no padding"


def _rows(request: _Request, attend: _Attend) -> Tensor:
    """Attend row by row over the real entries only; the output for padding is finite and otherwise undefined."""
    asked = request.asked
    near = request.sees
    assert request.stored.valid is not None
    query = asked.query
    values = request.stored.values
    groups = query.shape[1] // values.shape[1]
    new = query.shape[2]
    out = values[:, :, -new:].repeat_interleave(groups, 1)
    for row, real in enumerate(request.stored.valid[:, 0]):
        fresh = real[-new:]
        if bool(fresh.any()):
            part = asked.of(real_entries(query[row], fresh)[None])
            stored = real_row(request.stored, row, real)
            sees = Near(near.window, near.positions[row : row + 1, real])
            out[row, :, fresh.nonzero()[:, 0]] = attend(AttentionRequest(part, stored, sees))[0]
    return out


def _why_not_everything(request: _Request) -> str | None:
    window = request.sees.window
    if window.chunked:
        return "chunks begin anywhere"
    few = request.stored.keys.shape[2] <= window.span
    close = few and bool((request.sees.positions[:, -1] - request.sees.positions[:, 0] < window.span).all())
    return None if close else "some entries are behind the window"


def _blocks(request: _Request, attend: _Attend) -> Tensor:
    """Attend block of queries by block, under masks."""
    asked = request.asked
    window = request.sees.window
    query = asked.query
    new = query.shape[2]
    length = request.stored.keys.shape[2]
    positions = request.sees.positions.long()
    parts = []
    for first in range(0, new, _QUERIES):
        last = min(first + _QUERIES, new)
        # Positions ascend, so no more than a window's entries before the first query can be seen.
        low = max(length - new + first - window.span + 1, 0)
        seen = length - new + last
        asking = positions[:, length - new + first : seen]
        mask = window.sees(asking[:, :, None], positions[:, None, low:seen])[:, None]
        stored = between(request.stored, low, seen)
        parts.append(attend(AttentionRequest(asked.of(query[:, :, first:last]), stored, Shown(mask))))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def near_rows(attend: _Attend) -> tuple[Executor, ...]:
    """Return the executors for windows; attend: computes their parts."""
    return (
        Executor("row by row", _why_not_rows, lambda request: _rows(request, attend)),
        Executor(
            "as without a window",
            each_of(why_not_padded, _why_not_everything),
            lambda request: attend(AttentionRequest(request.asked, request.stored)),
        ),
        Executor("masked blocks", why_not_padded, lambda request: _blocks(request, attend)),
    )
