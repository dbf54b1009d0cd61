"""Full: a plain prefill of all documents in order, which every other join approximates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.planning.joins import Join, Span, register_join


@register_join("full", title="Full", paper="-")
@dataclass(frozen=True, kw_only=True)
class Full(Join):
    """Prefill all documents in order: exact."""

    def again(self, sizes: Sequence[int], start: int) -> list[Span]:
        return [(start, start + sum(sizes))]
