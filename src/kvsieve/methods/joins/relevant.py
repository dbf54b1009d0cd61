"""Documents that a question attends to, by a ratio of attention, prefilled again whole.

Documents are prefilled alone and moved to their places. The question passes over these entries, then its last token
alone: the end of a template, or a question mark, without content. A document's score is the attention of the question's
tokens to it over that of the last token alone, each summed over layers and the document's tokens. The document with
the largest score is then prefilled again in all layers: its tokens attend to all entries up to their own, updated or
not. Entries of all other documents are shifted by the mean change (`Join.shifts`), and the question is asked again for
each further document.

Attention alone falls with the distance, and prefers the last documents for any question; the ratio does not. Source of
the comparison: in-context re-ranking, which subtracts the attention of a question without content (arXiv 2410.02642).
Differences from it: the score is a quotient, and the text without content is the question's own end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int
from kvsieve.planning.joins import AskedAttention, AskedJoin, register_join

# Attention that a ratio divides by at least.
_LEAST = 1e-12


@register_join("relevant", title="Relevant documents", paper="arXiv 2410.02642")
@dataclass(frozen=True, kw_only=True)
class Relevant(AskedJoin):
    """Prefill the documents again that the question attends to most.

    documents: their number, one per round; the first document, exact in its place, takes no part.
    """

    documents: int = 1

    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int(self, "documents", self.documents, 1)

    @property
    def rounds(self) -> int:
        return self.documents

    @property
    def shifts(self) -> bool:
        return True

    def most(self, sizes: Sequence[int]) -> int:
        return sum(sorted(sizes)[-self.documents :])

    def choose(self, attention: AskedAttention) -> Tensor:
        assert attention.last is not None
        sizes = list(attention.sizes)
        parts = zip(attention.question.sum(0).split(sizes), attention.last.sum(0).split(sizes), strict=True)
        known = attention.again.split(sizes)
        scores = [
            -1.0 if done.any() else float(asked.sum() / other.sum().clamp_min(_LEAST))
            for (asked, other), done in zip(parts, known, strict=True)
        ]
        best = scores.index(max(scores))
        return torch.cat([torch.full((size,), number == best) for number, size in enumerate(sizes)])
