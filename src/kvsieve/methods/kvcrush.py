"""KVCrush: Key Value Cache Size-Reduction Using Similarity in Head-Behaviour (arXiv 2503.00022).

A part of the budget goes to the best entries by `base`'s scores, the rest to representatives of the others. Every token
has one bit per KV head: 1 if it is among the better half of the head's entries that compete. The Hamming distance of
these bits to an anchor orders the entries that were not kept; the representatives are evenly spaced in this order, from
the nearest to the farthest, one for each bucket of entries with similar bits.

Differences from the reference (the authors' code for vLLM and OpenVINO GenAI): entries are single tokens, not pages, so
that the paper's bits per head are the whole vector, and its anchors "mean" and "zeros" are the same; a head's
representatives are chosen among the entries that this head did not keep, not those of the first head; entries that
`base` protects come on top of the part that is divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import (
    Wrapper,
    at_entries,
    by_token,
    check_int,
    check_share,
    hide_padding,
    refuse_unused,
    scored_by_name,
)
from kvsieve.methods.chunkkv import best_first
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext

Anchor = Literal["alternating", "random", "zeros", "ones"]


@dataclass(frozen=True, kw_only=True)
class KVCrush(Wrapper, heads="all", query_aware=False):
    """Keep the best entries by `base`'s scores, and representatives: ``KVCrush(base=SnapKV(budget=0.2))``.

    representatives: their share of the budget without entries that `base` protects, in (0, 1]. anchor: bits per KV head
    from which distances are measured; "random" draws them once per `seed`.
    """

    representatives: float = 0.25
    anchor: Anchor = "alternating"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "representatives", self.representatives)
        if not self.representatives:
            raise PlanError(
                "KVCrush: representatives=0 keeps what base keeps alone; give a share above 0, or take base"
            )
        check_int(self, "seed", self.seed, 0)
        if self.anchor != "random":
            refuse_unused(self, f"anchor={self.anchor!r}", "seed")

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        scores = hide_padding(ctx, self.base.scores(ctx))
        must = scores.isposinf()
        free = scores.masked_fill(must, float("-inf"))
        competing = ~free.isneginf()
        number = competing.sum(-1, keepdim=True)
        budget = torch.tensor(kept).view(-1, 1, 1).to(scores.device, non_blocking=True)
        room = (budget - must.sum(-1, keepdim=True)).clamp_min(0).minimum(number)
        picks = (room * self.representatives).long()
        best = best_first(free)
        first = (best < room - picks) & competing
        others = competing & ~first
        distance = self.distance(ctx, (best < number // 2) & competing)
        place = distance.masked_fill(~others, float("inf")).argsort(dim=-1, stable=True).argsort(-1)
        spaced = evenly(place, others.sum(-1, keepdim=True), picks) & others
        return (-1 - best_first(scores)).masked_fill(spaced, 0).masked_fill(first | must, float("inf"))

    def distance(self, ctx: LayerContext, bits: Tensor) -> Tensor:
        """Return each entry's Hamming distance to the anchor over all heads, float32 [B, X, N].

        bits: bool [B, X, N]; a head that does not store a token has 0 for it.
        """
        heads = bits.shape[1] * ctx.ranks.size
        anchor = self.anchor_bits(heads)[ctx.ranks.own(heads)].to(bits.device, non_blocking=True)
        differing = by_token(ctx, bits, False) != anchor[None, :, None]
        total = ctx.ranks.mean(differing.sum(1, keepdim=True).float()) * ctx.ranks.size
        return at_entries(ctx, total, bits.shape[1])

    def anchor_bits(self, heads: int) -> Tensor:
        """Return the anchor, bool [heads]."""
        if self.anchor == "random":
            return torch.randint(0, 2, (heads,), generator=torch.Generator().manual_seed(self.seed)).bool()
        if self.anchor == "alternating":
            return torch.arange(heads) % 2 == 1
        return torch.full((heads,), self.anchor == "ones")


def evenly(place: Tensor, number: Tensor, picks: Tensor) -> Tensor:
    """Return bool, True for the places floor(i (n - 1) / (r - 1)) of i = 0 ... r - 1: r = `picks` of n = `number`."""
    gaps = (number - 1).clamp_min(1)
    steps = (picks - 1).clamp_min(0)
    nearest = ((place * steps + gaps - 1) // gaps).minimum(steps)
    on = (nearest * gaps) // steps.clamp_min(1) == place
    return torch.where(picks >= number, place < number, on.where(picks > 1, (place == 0) & (picks == 1)))


@register_method("kvcrush", title="KVCrush", paper="arXiv 2503.00022", phase="end of prompt")
def kvcrush(
    budget: Budget | str | int | float = "20%",
    base: str = "snapkv",
    representatives: float = 0.25,
    anchor: Anchor = "alternating",
    seed: int = 0,
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Keep the best entries by another method's scores, and representatives of the rest by binary head patterns."""
    scorer = scored_by_name("kvcrush", base, budget, skip_layers, every)
    return Plan(evict=KVCrush(base=scorer, representatives=representatives, anchor=anchor, seed=seed))
