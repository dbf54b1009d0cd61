"""ProphetKV: User-Query-Driven Selective Recomputation for Efficient KV Cache Reuse in RAG (arXiv 2602.02579).

Documents are prefilled alone and moved to their places. The question passes over these entries, and the attention of
its tokens to every token of the documents is summed over the layers. The tokens with the largest sums are then
prefilled again in all layers: they attend to all entries up to their own, updated or not. The question decides, so
tokens that matter for every question but not for this one take no part of the share.

Differences from the reference: the paper's text was not at hand, only its abstract. Attention here is the softmax over
all entries, mean over heads and the question's tokens, and its sum over layers has equal weights. Tokens of the first
document, which is exact in its place, do not take part. `shift` is an addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsieve.core.selection import select_top
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.joins.shares import parse_share
from kvsieve.planning.joins import AskedAttention, AskedJoin, register_join


@register_join("prophet", title="ProphetKV", paper="arXiv 2602.02579")
@dataclass(frozen=True, kw_only=True)
class Prophet(AskedJoin):
    """Prefill the tokens again that the question attends to most.

    share: of the tokens after the first document, those prefilled again; a share ("20%", 0.2).
    shift: other entries are shifted; see `Join.shifts`.
    """

    share: float | str = 0.2
    shift: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", parse_share(self, "share", self.share))

    @property
    def shifts(self) -> bool:
        return self.shift

    def most(self, sizes: Sequence[int]) -> int:
        total = sum(sizes)
        return min(max(1, round(total * float(self.share))), total)

    def choose(self, attention: AskedAttention) -> Tensor:
        exact, *sizes = attention.sizes
        scores = attention.question.sum(0)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen[exact + select_top(scores[None, exact:], (self.most(sizes),)).indices.flatten()] = True
        return chosen
