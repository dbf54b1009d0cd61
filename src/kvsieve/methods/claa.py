"""CLAA (arXiv 2602.16054).

Cross-Layer Attention Aggregation for Accelerating LLM Prefill.

As in FastKV, tokens are dropped permanently after one layer, by the attention from the prompt's last queries. Rankings
of single layers fluctuate, so several are combined: a token's score is the largest of those at the `joined` layers that
end with the one that drops. A layer's score is FastKV's: pooled window mass, mean over all query heads. Independently,
SnapKV with the same window and pooling chooses the entries to store; the first layers, which rank worst, store
everything (`skip_layers`, 4 in the paper).

Published for models of 3 to 12B: layer 15, four layers joined, window 8, kernel 7. Written from the paper's abstract
and others' notes on it, without its full text: the largest score and these numbers are from the notes, the mean over
query heads is FastKV's.

Differences from the paper: separate parameters for propagation (`tsp_rate`) and storage (`budget`), as in FastKV, where
the paper has one rate; each layer ranks its own entries to store; if not all layers attend to all tokens, only those
that do are joined; batches, padding and later turns as in FastKV.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import Kernel, Pool, pooled_mass, width
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int
from kvsieve.methods.fastkv import TSP, best_offered
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.planning.roles import Layers
from kvsieve.types import LayerContext, Selection

_SCORES = "claa_scores"
_DROPS = "claa_drops"


@dataclass(frozen=True, kw_only=True)
class CrossLayerTSP(TSP, heads="all", query_aware=True):
    """Token-selective propagation by the largest of several layers' scores; `rate` and the rest as TSP's.

    joined: number of combined layers, up to the one that drops tokens; 1 is TSP.
    """

    joined: int = 4

    def __post_init__(self) -> None:
        check_int(self, "joined", self.joined, 1)
        super().__post_init__()

    def drops(self, num_layers: int) -> tuple[tuple[int, Budget], ...]:
        """Return the layers after which tokens are dropped, in order, with the tokens propagated from each."""
        return ((self.source(num_layers), self.rate),)

    def _steps(self, num_layers: int, layers: tuple[int, ...]) -> list[tuple[int, Budget]]:
        """Return the drops by place among `layers`, those with attention to all tokens; the last one of a place counts.

        Tokens are dropped after the first of these layers that is not before the named one.
        """
        return list({sum(other < layer for other in layers): rate for layer, rate in self.drops(num_layers)}.items())

    def select(self, ctx: LayerContext) -> Selection | None:
        layers = ctx.layers or tuple(range(ctx.num_layers))
        done = ctx.shared.get(_DROPS, 0)
        steps = self._steps(ctx.num_layers, layers)
        if done == len(steps):
            return None
        (at, rate), here = steps[done], layers.index(ctx.layer_idx)
        lengths = ctx.step.turn_lengths
        offered = ctx.offered_counts
        counts = tuple(min(n, rate.entries(length, self.window)) for n, length in zip(offered, lengths, strict=True))
        seen: list[Tensor] = ctx.shared.setdefault(_SCORES, [])
        if at - here < self.joined and counts != offered:
            first = ctx.keys.shape[2] - ctx.offered
            kernel = width(self.kernel, map(rate.entries, lengths))
            seen.append(ctx.ranks.mean(pooled_mass(ctx, self.window, kernel, self.pooling).mean(1)[:, first:]))
            del seen[: -self.joined]
        if here < at:
            return None
        ctx.shared[_DROPS] = done + 1
        if counts == offered:
            return None
        joined = torch.stack(seen).amax(0)
        selection = best_offered(ctx, joined, counts)
        rest = selection.indices[:, : selection.indices.shape[1] - (ctx.offered - joined.shape[1])]
        seen[:] = [part.gather(1, rest) for part in seen]
        return selection


@register_method("claa", title="CLAA", paper="arXiv 2602.16054", phase="prefill, end of prompt", derive=defaults.fastkv)
@dataclass(frozen=True, kw_only=True)
class CLAAParameters(Parameters):
    """FastKV that ranks tokens by their largest score over several layers."""

    budget: Budget | str | int | float = "10%"
    tsp_layer: int | None = None
    tsp_rate: Budget | str | int | float = 0.2
    joined: int = 4
    window: int = 8
    kernel: Kernel = 7
    pooling: Pool = "max"
    skip_layers: Layers | str = 4

    def plan(self) -> Plan:
        propagate = self.role(CrossLayerTSP, rate=self.tsp_rate, layer=self.tsp_layer)
        return Plan(propagate=propagate, evict=self.role(SnapKV))
