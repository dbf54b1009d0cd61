"""FastKV (arXiv 2502.01068).

Decoupling of Context Reduction and KV Cache Compression for Prefill-Decoding Acceleration.

Layers up to the TSP layer T compute the whole prompt. The hidden states after T, its MLP and residual included, are
reduced to the most salient tokens (eq. 2: pooled window mass, mean over all query heads) and the observation window;
deeper layers compute only those, with their original positions. Independently, every layer stores by group-shared
SnapKV with the same window and pooling, with `budget` counted on the full prompt in every layer.

The defaults are the paper's: window 8, kernel 7, TSP rate 20%, KV retention 10%, and the TSP layer of a model of the
same depth (15 of 32, 17 of 36), about half the depth.

Differences from the reference: batches and padding; propagation does not depend on the KV branch; on a later turn the
new tokens attend to everything stored and only they are propagated (the reference ignores the cache there); max pooling
as in the reference's evaluation, average pooling by option (the paper does not say which).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import Kernel, Pool, pooled_mass, width
from kvsieve.core.selection import select_top
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor
from kvsieve.methods.base import apply_protection, check_int, check_kernel
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Propagator
from kvsieve.types import LayerContext, Selection


@dataclass(frozen=True, kw_only=True)
class TSP(Propagator, heads="all", query_aware=True):
    """Token-selective propagation: after `layer` only salient tokens continue.

    rate: tokens propagated, including the window; a Budget, a share ("30%", 0.3) or a number (2048) of the turn's
    prompt. layer: T, 0-based, the last layer with all tokens; None for the papers' choice, about half the depth.
    window: W, observing queries at the prompt's end, always propagated. kernel: odd width of the pooling. pooling:
    "avg" or "max".
    """

    rate: Budget
    layer: int | None = None
    window: int = 8
    kernel: Kernel = 7
    pooling: Pool = "max"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", Budget.parse(self.rate, "rate"))
        self.rate.refuse_bytes("TSP", "tsp_rate", "it counts tokens that go on to deeper layers, not what is stored")
        if self.layer is not None:
            check_int(self, "layer", self.layer, 0)
        check_int(self, "window", self.window, 1)
        check_kernel(self, self.kernel)
        self.rate.refuse_fewer(self.window, "TSP", f"the window of {self.window}", "tsp_rate")

    def source(self, num_layers: int) -> int:
        half = num_layers // 2 - 1
        layer = defaults.layer_at_depth("fastkv", num_layers, half) if self.layer is None else self.layer
        if not 0 <= layer < num_layers - 1:
            raise PlanError(
                f"TSP layer {layer} is outside the model: it has {num_layers} layers, so the TSP layer must lie in "
                f"0..{num_layers - 2} to leave a deeper layer to save on; set tsp_layer="
            )
        return layer

    def caution(self, num_layers: int) -> str | None:
        if self.layer is not None:
            return None
        return (
            f"no tsp_layer given: using layer {self.source(num_layers)} of {num_layers}, the papers' choice for models "
            "of 8B; small models need a deeper one, so compare answers before you rely on it"
        )

    def select(self, ctx: LayerContext) -> Selection | None:
        if ctx.layer_idx != self.first_layer(ctx.num_layers, ctx.layers):
            return None
        offered = ctx.offered_counts
        counts = tuple(min(n, self.rate.entries(n, self.window)) for n in offered)
        if counts == offered:
            return None
        first = ctx.keys.shape[2] - ctx.offered
        kernel = width(self.kernel, map(self.rate.entries, ctx.offered_counts))
        saliency = ctx.ranks.mean(pooled_mass(ctx, self.window, kernel, self.pooling).mean(1)[:, first:])
        return best_offered(ctx, saliency, counts)


def best_offered(ctx: LayerContext, saliency: Tensor, counts: tuple[int, ...]) -> Selection:
    """Return the best of the offered tokens by their saliency [B, M], and those after them, ``counts[b]`` in all.

    Protected tokens are propagated as well, beyond the counts if necessary.
    """
    scores = saliency.new_full((saliency.shape[0], ctx.offered), float("inf"))
    scores[:, : saliency.shape[1]] = saliency
    if ctx.valid is not None:
        scores = scores.masked_fill(~ctx.valid[:, 0, -ctx.offered :], float("-inf"))
    ranking, counts = apply_protection(ctx, scores[:, None], counts, insist=True)
    return select_top(ranking[:, 0], counts)


@register_method(
    "fastkv", title="FastKV", paper="arXiv 2502.01068", phase="prefill, end of prompt", derive=defaults.fastkv
)
def fastkv(
    budget: Budget | str | int | float = "10%",
    tsp_layer: int | None = None,
    tsp_rate: Budget | str | int | float = 0.2,
    window: int = 8,
    kernel: Kernel = 7,
    pooling: Pool = "max",
) -> Plan:
    """Propagate only the most attended tokens beyond one layer, and evict by SnapKV."""
    return Plan(
        propagate=TSP(
            rate=Budget.parse(tsp_rate, "tsp_rate"), layer=tsp_layer, window=window, kernel=kernel, pooling=pooling
        ),
        evict=SnapKV(budget=Budget.parse(budget), window=window, kernel=kernel, pooling=pooling),
    )
