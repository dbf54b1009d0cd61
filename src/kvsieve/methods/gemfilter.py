"""GemFilter (arXiv 2409.17422), algorithm 1.

Discovering the Gems in Early Layers: Accelerating Long-Context LLMs with 1000x Input Token Reduction.

A first pass over the prompt ends at a filter layer. There each token's score is the dot product of its key with the
prompt's last query, unscaled and without softmax, summed over all query heads and average-pooled along the sequence.
The ids of the best k tokens, in order, are prefilled as a new prompt at positions 0..k-1; decode continues at k. So one
budget sets the costs of prefill and storage, and nothing of the first pass is kept.

Differences from the reference: the prompt's last token is always kept (``paper=True`` sets `keep_last=0` as there, and
answers may then start from a wrong token); batches and padding; on a later turn the whole conversation is filtered
again; without `layer` the filter layer is the published one of a model of the same depth
(kvsieve.planning.defaults.LAYERS), else 13/32.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import Kernel, pool, score_dtype, width
from kvsieve.core.selection import pack, top_mask
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import apply_protection, check_int, check_kernel
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Propagator
from kvsieve.types import LayerContext, Selection


@register_method(
    "gemfilter", title="GemFilter", paper="arXiv 2409.17422", phase="prefill", derive=defaults.gemfilter, budget=1024
)
@dataclass(frozen=True, kw_only=True)
class GemFilter(Propagator, heads="all", query_aware=True):
    """Prefill again with only the tokens that an early layer's last query attends to.

    budget: k, tokens prefilled again; a Budget, a share ("20%", 0.2) or a number (1024) of the whole prompt. layer: the
    filter layer, 0-based, the last one of the first pass. None for the published one of a model of the same depth, else
    13/32 of the depth. kernel: odd width of the average pooling. keep_last: last tokens always kept, within the budget.
    """

    budget: Budget
    layer: int | None = None
    kernel: Kernel = 5
    keep_last: int = 1

    two_pass = True
    window = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        if self.layer is not None:
            check_int(self, "layer", self.layer, 0)
        check_kernel(self, self.kernel)
        check_int(self, "keep_last", self.keep_last, 0)
        if self.budget.tokens is not None and self.budget.tokens < self.keep_last:
            raise PlanError(
                f"GemFilter: a budget of {self.budget.tokens} tokens is too small for keep_last={self.keep_last}; "
                "raise budget="
            )

    def source(self, num_layers: int) -> int:
        otherwise = num_layers * 13 // 32
        layer = defaults.layer_at_depth("gemfilter", num_layers, otherwise) if self.layer is None else self.layer
        if layer >= num_layers:
            raise PlanError(
                f"filter layer {layer} is outside the model: it has {num_layers} layers, so the filter layer must lie "
                f"in 0..{num_layers - 1}; set layer="
            )
        return layer

    def caution(self, num_layers: int) -> str | None:
        if self.layer is not None:
            return None
        return (
            f"no filter layer given: using layer {self.source(num_layers)} of {num_layers}, the depth published for a "
            "model of 8B; small models need a deeper one, so compare answers before you rely on it"
        )

    def reread_tokens(self, length: int) -> int:
        return min(length, self.budget.entries(length, max(self.keep_last, 1)))

    def select(self, ctx: LayerContext) -> Selection | None:
        if ctx.layer_idx != self.first_layer(ctx.num_layers, ctx.layers):
            return None
        ctx.shared["report"] = {"filter_layer": ctx.layer_idx}
        counts = tuple(self.reread_tokens(length) for length in ctx.offered_counts)
        return pack(*self.best(ctx, counts))

    def best(self, ctx: LayerContext, counts: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
        """Return the ``counts[b]`` tokens of each row to prefill again, bool [B, N]; and their final numbers."""
        dtype = score_dtype(ctx.keys.dtype)
        batch, heads, length, dim = ctx.keys.shape
        # Dot products are linear, so the query heads of a group can be summed first.
        query = ctx.query[:, :, -1].to(dtype).view(batch, heads, -1, dim).sum(2)
        scores = torch.zeros(batch, length, dtype=dtype, device=ctx.keys.device)
        for head in range(heads):
            scores += (ctx.keys[:, head].to(dtype) @ query[:, head, :, None])[..., 0]
        # A mean over ranks of sums over heads ranks tokens like the sum over all heads.
        scores = ctx.ranks.mean(scores)
        real = None if ctx.valid is None else ctx.valid[:, 0]
        # Pooling counts zeros beyond the ends, and so it must at a row's own start.
        scores = pool(
            scores if real is None else scores.masked_fill(~real, 0),
            width(self.kernel, map(self.budget.entries, ctx.offered_counts)),
            "avg",
        )
        if real is not None:
            scores = scores.masked_fill(~real, float("-inf"))
        if self.keep_last:
            scores[:, -self.keep_last :] = float("inf")
        ranking, counts = apply_protection(ctx, scores[:, None], counts, insist=True)
        return top_mask(ranking[:, 0], counts), counts
