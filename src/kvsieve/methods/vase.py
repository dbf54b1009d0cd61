"""VaSE: Value-Aware Stochastic KV Cache Eviction for Reasoning Models (arXiv 2606.03928), VaSE-AttnV.

A few values are far larger than the others, and a model that loses them repeats itself. The newest W entries stay. Of
the older ones of each KV head, the `large` with the greatest range of the value's channels (maximum minus minimum)
stay, the first four entries among them. The rest of the budget is sampled without replacement, in proportion to
attention: the softmax over the older entries of the last W queries, averaged over queries, pooled along the sequence
(average, width 5), and averaged over the group. Evicts after every W generated tokens.

Samples are drawn by perturbing logarithms with Gumbel noise, hashed as in `methods.random`.

Differences from the reference (its public code): it evicts at the end of prompts, too, and counts the W tokens from
there; other random numbers. VaSE-DKV, which draws CurDKV's projection anew, is not here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.draws import drawn
from kvsieve.core.queries import query_mass
from kvsieve.core.scoring import group_mean, pool, score_dtype
from kvsieve.core.selection import top_mask
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, check_int, first_real, last_real, positions
from kvsieve.methods.decoding import before_window
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext

_SINKS = 4
_KERNEL = 5


@register_method("vase", title="VaSE", paper="arXiv 2606.03928", phase="end of prompt, decode", budget="20%")
@dataclass(frozen=True, kw_only=True)
class VaSE(ScoredEvictor, heads="own", query_aware=True):
    """Keep recent entries and those with the largest values, and sample the others by their attention.

    window: W, newest entries, always kept, whose queries weigh the others. large: entries with the largest values,
    always kept; the first four entries count among them. seed: of the draws.
    """

    stays = ("window", "large")

    every: int | None = 128
    window: int = 128
    large: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        check_int(self, "window", self.window, 1)
        check_int(self, "large", self.large, 0)
        check_int(self, "seed", self.seed, 0)
        super().__post_init__()

    def scores(self, ctx: LayerContext) -> Tensor:
        asked, older, visible = before_window(ctx, self.window)
        mass = pool(query_mass(asked, ctx.keys, visible), _KERNEL, "avg", ctx.valid)
        chance = group_mean(mass, ctx.keys.shape[1]).float()
        noise = -(-drawn(ctx, positions(ctx), self.seed).log()).log()
        scores = chance.clamp_min(torch.finfo(chance.dtype).tiny).log() + noise
        values = ctx.values.to(score_dtype(ctx.values.dtype))
        size = values.amax(-1) - values.amin(-1)
        size = size.masked_fill(first_real(ctx, _SINKS), float("inf")).masked_fill(~older, float("-inf"))
        stays = top_mask(size, (self.large,) * len(size)) & older
        return scores.masked_fill(stays | last_real(ctx, self.window), float("inf"))
