"""Display of objects: one short line, or a small table in a notebook."""

from __future__ import annotations

import dataclasses
import hashlib
import html
from collections.abc import Iterable
from typing import Any

_LONGEST = 40


def mebibytes(count: int, unit: str = " MiB") -> str:
    """Write bytes as ``11.1 MiB``."""
    value = count / 2**20
    return f"{value:.1f}{unit}" if value >= 0.1 else f"{value:.3f}{unit}"


def bytes_text(count: float) -> str:
    """Write bytes as ``1.17 GiB``, or as ``11.10 MiB`` below one."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def percent(share: float) -> str:
    """Write a share as ``20%``; below one per cent with a decimal."""
    return f"{share:.0%}" if share >= 0.01 or share == 0 else f"{share:.1%}"


def span(entries: Iterable[float], between: str = "–") -> str:
    """Format the range of several numbers as ``40–120``, ignoring layers with 0 entries."""
    counts = sorted({count for count in entries if count}) or [0]
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]}{between}{counts[-1]}"


def brief(value: Any) -> str:
    """Format a role, or a field of one, without default values: ``SnapKV(budget=20%, window=32)``.

    A long value is cut and ends with a digest, so that different values look different.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__str__ is not object.__str__:
            return str(value)
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        shown = [f"{field.name}={brief(part)}" for field, part in fields if not _same(part, field.default)]
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, (list, tuple)) and any(isinstance(part, (list, tuple)) for part in value):
        return f"[{len(value)} rows {_digest(repr(value))}]"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}… {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return a table for a notebook: a caption and a row for each name and value, all escaped."""
    body = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption style='text-align:left'><b>{html.escape(title)}</b></caption>{body}</table>"


def _same(value: Any, default: Any) -> bool:
    # Comparing a tensor or an array gives no single result.
    return type(value) is type(default) and isinstance(value, (int, float, str, bool, type(None))) and value == default
