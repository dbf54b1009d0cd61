"""Documents that a question attends to, by a ratio of attention, prefilled again whole.

Documents are prefilled alone and moved to their places. The question passes over these entries, then its last token
alone: the end of a template, or a question mark, without content. A document's score is the attention of the question's
tokens to it over that of the last token alone, each summed over layers and the document's tokens. The documents with
the largest scores are then prefilled again in all layers: their tokens attend to all entries up to their own, updated
or not.

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


@register_join(
    "relevant",
    title="Relevant documents",
    paper="arXiv 2410.02642",
    summary="Prefill the documents again that the question attends to most.",
)
@dataclass(frozen=True, kw_only=True)
class Relevant(AskedJoin):
    """Prefill the documents again, whole, to which the question attends most.

    documents: their number; the first document, exact in its place, takes no part. Those prefilled again draw most of
        the attention, wrong ones too, so few are best.
    """

    documents: int = 1

    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int(self, "documents", self.documents, 1)

    def most(self, sizes: Sequence[int]) -> int:
        return sum(sorted(sizes)[-self.documents :])

    def choose(self, attention: AskedAttention) -> Tensor:
        assert attention.last is not None
        sizes = list(attention.sizes)
        parts = zip(attention.question.sum(0).split(sizes), attention.last.sum(0).split(sizes), strict=True)
        scores = torch.stack([asked.sum() / other.sum().clamp_min(_LEAST) for asked, other in parts])
        best = set(scores.topk(min(self.documents, len(sizes))).indices.tolist())
        return torch.cat([torch.full((size,), number in best) for number, size in enumerate(sizes)])
