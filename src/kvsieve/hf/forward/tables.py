"""Rotary tables of a pass, for tables that depend on the length of the sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.hf.forward import passes
from kvsieve.hf.forward.rows import RowsSession
from kvsieve.hf.forward.session import Session
from kvsieve.hf.model.tables import RotaryTables


def make_tables(tables: RotaryTables, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Replace the rotary module's output by the tables of the whole sequence. A forward hook of the module."""
    session = passes.current()
    recorded = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if session is None or recorded:
        return None
    call = tables.arguments(args, kwargs)
    positions: Tensor = call["position_ids"]
    if isinstance(session, RowsSession) and session.widths is None:
        parts = zip(session.rows, positions.expand(len(session.rows), -1).split(1), strict=True)
        return tables.at_lengths(call, [_length(row, part) for row, part in parts])
    # Tokens of an answer have the tables that each would have alone.
    columns = positions.split(1 if session.step.phase == "decode" else positions.shape[-1], -1)
    owners = [session] * len(columns)
    if isinstance(session, RowsSession):
        owners = [row for row in session.rows for _ in range(row.tokens.size)]
    pairs = zip(owners, columns, strict=True)
    found = [tables.at_lengths({**call, "position_ids": part}, [_length(owner, part)]) for owner, part in pairs]
    return found[0] if len(found) == 1 else _joined(found)


def _joined(found: list[Any]) -> Any:
    """Concatenate the tables of tokens."""
    if isinstance(found[0], Tensor):
        return torch.cat(found, -2)
    return tuple(torch.cat(parts, -2) for parts in zip(*found, strict=True))


def _length(session: Session, positions: Tensor) -> int:
    """Return the length of the sequence, of the longest row, and record that its tables are used for keys."""
    length = int(positions.max()) + 1
    if session.step.phase == "prefill" and session.cache.turn.length is not None:
        length = max(length, session.cache.turn.length)
    session.cache.conversation.note_tables(length)
    return length
