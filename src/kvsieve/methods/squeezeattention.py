"""SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal Budget (arXiv 2404.04793).

During prefill, each layer's cosine similarity between the residual stream before and after self-attention is averaged
over the prompt's tokens: attention matters least in the layer with the least change. Layers form three clusters by it;
those of the most similar one keep `p` times the budget, and the others share the rest. The base chooses the entries, by
default sinks and the most recent.

All layers store the whole prompt until the last layer, so memory falls only then.

Differences from the reference: `p` multiplies the budget, as in the paper (in the code it is a share of the prompt);
the clusters are the exact optimum, not those of a random start; the total is met to the entry. Biases, norms and
factors between the output projection and the residual stream, which a few models have, are ignored in the similarity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvsieve.core.allocation import clusters
from kvsieve.core.scoring import score_dtype
from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.methods.allocators import Cascade, LayerScores
from kvsieve.methods.base import ScoredEvictor, model_facts, scored_by_name
from kvsieve.methods.streaming_llm import StreamingLLM
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, When

_BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class SqueezeAttention(Cascade, needs=("hidden", "output_weight"), heads="all", query_aware=False):
    """Give layers with little effect of attention less budget: ``SqueezeAttention(base=StreamingLLM(budget=0.2))``.

    base: ranks entries and has the budget, the mean over layers. p: times the budget for the layers with the least
    change by attention, in (0, 1].
    """

    defer_until_last_layer: ClassVar[bool] = True

    base: ScoredEvictor = StreamingLLM(budget=Budget(ratio=0.2))
    p: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.p <= 1:
            raise PlanError(f"SqueezeAttention: p must be a share in (0, 1], got {self.p!r}")

    @property
    def spare(self) -> int:
        return 0

    @property
    def when(self) -> When:
        return dataclasses.replace(self.base.when, observes=True)

    def observe(self, ctx: LayerContext) -> None:
        if self.base.when.observes:
            super().observe(ctx)
        if ctx.step.phase == "decode":
            return
        found, number = _similarities(ctx)
        before = ctx.state.get("similarity")
        ctx.state["similarity"] = torch.stack([found, number], 1) + (0 if before is None else before)

    def weigh(self, ctx: LayerContext) -> list[float]:
        seen = ctx.state.get("similarity")
        if seen is None:
            raise UnsupportedModelError("SqueezeAttention was not shown the prompt as it was read; see Evictor.observe")
        # Hidden states are whole on every rank, but may differ in their last bits.
        return [total / max(number, 1.0) for total, number in ctx.ranks.mean(seen).tolist()]

    def weights(self, seen: Sequence[LayerScores], row: int) -> list[float]:
        groups = clusters([layer.weights[row] for layer in seen], 3)
        similar = groups.count(max(groups))
        if similar == len(seen):
            return [1.0] * len(seen)
        others = (len(seen) - similar * self.p) / (len(seen) - similar)
        return [self.p if group == max(groups) else others for group in groups]


def _similarities(ctx: LayerContext) -> tuple[Tensor, Tensor]:
    """Return the residual stream's similarity after attention, summed over this pass's tokens, and their number [B]."""
    if ctx.hidden is None or ctx.output is None:
        raise UnsupportedModelError("SqueezeAttention was shown no hidden states, which kvsieve.attach provides")
    weight = model_facts(ctx).output_weight(ctx.layer_idx).flatten(0, 1)
    batch, _, new, _ = ctx.output.shape
    dtype = score_dtype(ctx.hidden.dtype)
    real = torch.ones(batch, new, dtype=torch.bool, device=ctx.hidden.device)
    if ctx.valid is not None:
        real = ctx.valid[:, 0, -new:].expand(batch, -1)
    total = torch.zeros(batch, dtype=dtype, device=ctx.hidden.device)
    for start in range(0, new, _BLOCK):
        part = slice(start, start + _BLOCK)
        hidden = ctx.hidden[:, part].to(dtype)
        change = (ctx.output[:, :, part].transpose(1, 2).flatten(2) @ weight.to(ctx.output.device)).to(dtype)
        # The output projection sums over heads; a rank has the part of its own heads.
        change = ctx.ranks.mean(change) * ctx.ranks.size
        similar = F.cosine_similarity(hidden, hidden + change, dim=-1)
        total += similar.masked_fill(~real[:, part], 0).sum(1)
    return total, real.sum(1).to(dtype)


@register_method("squeezeattention", title="SqueezeAttention", paper="arXiv 2404.04793", phase="end of prompt")
def squeezeattention(
    budget: Budget | str | int | float = "20%",
    base: str = "streamingllm",
    p: float = 0.3,
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Give less budget to the layers where attention changes the hidden states least."""
    return Plan(evict=SqueezeAttention(base=scored_by_name("squeezeattention", base, budget, skip_layers, every), p=p))
