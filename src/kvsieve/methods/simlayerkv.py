"""SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction (arXiv 2410.13846).

A layer is lazy if its last queries attend almost only to the first tokens and the most recent ones: if their attention
to these, averaged over queries and heads, exceeds a threshold. Lazy layers keep only those entries; the other layers
keep everything.

Differences from the reference: the queries are the prompt's last ones (the original's first variant; its second one
takes the first generated token); `budget` is the number of entries of a lazy layer, so that the number of recent ones
is the budget without `sinks`; laziness is found per row; `every` rolls the window of lazy layers during decode, which
the original always does.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import mass_of
from kvsieve.core.selection import top_mask
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor
from kvsieve.methods.base import check_int, hide_padding, keep_best, skips
from kvsieve.methods.streaming_llm import StreamingLLM
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, Selection


@register_method("simlayerkv", title="SimLayerKV", paper="arXiv 2410.13846", phase="end of prompt", budget=1028)
@dataclass(frozen=True, kw_only=True)
class SimLayerKV(StreamingLLM, heads="all", query_aware=True):
    """Keep sinks and recent tokens in layers whose last queries attend to little else, and all in the others.

    budget: entries of a lazy layer, `sinks` included. threshold: share of attention above which a layer is lazy, in
    [0, 1]. observed: last queries of the prompt that are looked at, at least 1.
    """

    threshold: float = 0.9
    observed: int = 1

    def __post_init__(self) -> None:
        check_int(self, "observed", self.observed, 1)
        if not 0 <= self.threshold <= 1:
            raise PlanError(f"SimLayerKV: threshold must be a share of attention in [0, 1], got {self.threshold!r}")
        super().__post_init__()
        self.budget.refuse_bytes("SimLayerKV", "budget", "it is what lazy layers keep, and the others keep everything")

    @property
    def window(self) -> int:
        return self.observed

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        if ctx.step.phase == "prefill":
            ctx.state["lazy"] = self.attended(ctx, tuple(map(min, counts, ctx.stored))).cpu() > self.threshold
        rows = zip(counts, ctx.stored, ctx.state["lazy"].tolist(), strict=True)
        return keep_best(self, ctx, tuple(count if drops else max(count, stored) for count, stored, drops in rows))

    def attended(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        """Return the share of the last queries' attention that a lazy layer's entries get, mean over heads, [B]."""
        stays = top_mask(hide_padding(ctx, self.scores(ctx)), kept)
        window = min(self.observed, ctx.query.shape[2])
        mass = mass_of(ctx, -window).unflatten(1, (stays.shape[1], -1))
        share = (mass * stays[:, :, None]).sum(-1).mean((1, 2))
        real = window if ctx.valid is None else ctx.valid[:, 0, -window:].sum(-1).clamp_min(1)
        return ctx.ranks.mean(share / real)
