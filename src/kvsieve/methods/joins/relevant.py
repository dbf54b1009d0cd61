"""Documents that a question is about, by attention and by words, prefilled again whole.

Documents are prefilled alone and moved to their places. The question passes over these entries, then its last token
alone: the end of a template, or a question mark, without content. A token's attention is that of the question's tokens
to it less that of the last token alone, each summed over layers, at least 0; a document's is the sum over its tokens.
Attention as it is falls with the distance, and prefers the last documents for any question. A document's words are the
sum over the tokens that it has of the token's weight times the square of log(documents / documents with the token).
Tokens of the question have weight 1.

The document with the largest score is chosen: words and three quarters of attention, both in standard deviations from
their mean over the documents left. Tokens that have led to it lose their weight. Its other ones, unless the question
has them, get their attention as weight, over the largest one. So a name in it leads to the document with the other half
of an answer. Documents chosen, but the first, are then prefilled again in all layers: their tokens attend to all
entries up to their own, updated or not. Entries of all others are shifted by the mean change (`Join.shifts`).

Sources: in-context re-ranking (arXiv 2410.02642), which subtracts the attention of a question without content, and
inverse document frequency (Sparck Jones, 1972). Differences from the former: words take part, and the text without
content is the question's own end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int
from kvsieve.planning.joins import AskedAttention, AskedJoin, register_join

# Scores are divided by at least the first, and by the second of the largest.
_LEAST = 1e-12
_ROUNDING = 1e-5


@register_join("relevant", title="Relevant documents", paper="arXiv 2410.02642")
@dataclass(frozen=True, kw_only=True)
class Relevant(AskedJoin):
    """Prefill the documents again, whole, that the question is about.

    documents: their number; the first document, exact in its place, counts if it is one of them.
    """

    documents: int = 2

    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int(self, "documents", self.documents, 1)

    @property
    def shifts(self) -> bool:
        return True

    def most(self, sizes: Sequence[int]) -> int:
        return sum(sorted(sizes)[-self.documents :])

    def choose(self, attention: AskedAttention) -> Tensor:
        assert attention.last is not None
        sizes = list(attention.sizes)
        more = (attention.question.sum(0) - attention.last.sum(0)).clamp_min(0).float().cpu()
        drawn = torch.stack([part.sum() for part in more.split(sizes)])
        tokens, kind = attention.ids.unique(return_inverse=True)
        document = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        has = torch.zeros(len(sizes), len(tokens))
        has[document, kind] = 1
        rare = (len(sizes) / has.sum(0)).log().square()
        in_question = torch.isin(tokens, attention.asked)
        weight = in_question.float()
        chosen = torch.zeros(len(sizes), dtype=torch.bool)
        for _ in range(min(self.documents, len(sizes))):
            scores = _standard(has @ (weight * rare), chosen) + 0.75 * _standard(drawn, chosen)
            best = int(scores.masked_fill(chosen, -math.inf).argmax())
            chosen[best] = True
            own = document == best
            leads = torch.zeros_like(weight).index_add(0, kind[own], more[own]) * ~in_question
            leads /= leads.max().clamp_min(_LEAST)
            here = has[best] > 0
            weight = torch.where(here & (weight > 0), 0, torch.where(here, leads, weight))
        return chosen.repeat_interleave(torch.tensor(sizes))


def _standard(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return scores in standard deviations from the mean of the documents that are not chosen."""
    left = scores[~chosen]
    # What differs by rounding alone counts for nearly nothing.
    least = max(_LEAST, _ROUNDING * float(left.abs().max()))
    return (scores - left.mean()) / left.std(correction=0).clamp_min(least)
