"""LegoLink of EPIC: Efficient Position-Independent Caching for Serving Large Language Models (arXiv 2410.15332).

The first tokens of a document that was prefilled alone draw attention as sinks do, and keep that in the middle of a
prompt. So the first k tokens of every document but the first are computed again in their places, attending to
everything before them; all other entries are reused. The paper uses k up to 32.

Differences from the reference: documents are prefilled after the tokens that precede the first one, which makes the
first document exact; keys are rotated to their places, instead of being stored without positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvsieve.methods.base import check_int
from kvsieve.planning.joins import Join, Span, register_join


@register_join("link", title="LegoLink", paper="arXiv 2410.15332")
@dataclass(frozen=True, kw_only=True)
class Link(Join):
    """Prefill the first tokens of each document again, in its place.

    tokens: of each document but the first.
    shift: other entries are shifted; see `Join.shifts`.
    """

    tokens: int = 32
    shift: bool = False

    def __post_init__(self) -> None:
        check_int(self, "tokens", self.tokens, 1)

    @property
    def shifts(self) -> bool:
        return self.shift

    def again(self, sizes: Sequence[int], start: int) -> list[Span]:
        places = accumulate(sizes[:-1], initial=start)
        return [(at, at + min(self.tokens, size)) for at, size in zip(places, sizes, strict=True)][1:]
