"""PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference (arXiv 2405.12532), section 4, prefill.

Every layer passes on fewer hidden states than it got. The last R+1 tokens, R a share of the prompt, and the sinks are
always passed on; the context before them is ranked by the attention from those R+1 queries, averaged over all heads,
later queries weighted a little more. The share of its context that a layer passes on falls with depth, from 1 at layer
0 to about `rate`; the shares of all layers multiply. A layer stores the tokens it got, so one number sets the costs of
prefill and storage; `budget=` additionally evicts, as FastKV does.

Differences from the reference: the tail's attention is computed in blocks, without the N x N map (the same numbers);
the linear schedule falls with depth (the reference's would rise, and is never used); batches and padding; on a later
turn the new tokens attend to everything stored and only they are dropped; nothing is dropped during decode (the
reference re-ranks generated tokens in blocks of 16; combine with an evictor with `every=` instead). The last chunk of a
chunked prompt contains the whole tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvsieve.core.scoring import Kernel, score_dtype
from kvsieve.core.selection import select_top
from kvsieve.core.softmax import cap, sinks_of, softmax
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import apply_protection, check_int, refuse_unused
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.planning.roles import Propagator
from kvsieve.types import LayerContext, Selection

Strategy = Literal["cosine", "linear"]

# Attention weights of one block of queries, [B, Hq, block, N] in float32, stay under about 128 MiB.
_BLOCK_ELEMENTS = 1 << 25


@dataclass(frozen=True, kw_only=True)
class PyramidInfer(Propagator, heads="all", query_aware=True):
    """Drop hidden states layer by layer.

    rate: share of its context, in (0, 1], that the deepest layer would pass on. Shares per layer multiply, so it is not
    the share of the prompt that is left: with recent=0.2 and 32 layers, 0.9 leaves 77% of all tokens on average over
    the layers, 0.7 leaves 60% and 0.3 half. recent: R as a share of the prompt, in [0, 1). strategy: decline of the
    share, "cosine" or "linear". interval: layers between two drops. min_context: a layer's context always exceeds this
    many tokens. floor: least tokens of a turn's prompt that every layer passes on. sinks: first tokens of the
    conversation, always passed on. distance_weight: weight of the last query; the first of the tail has 1.
    """

    rate: float = 0.9
    recent: float = 0.2
    strategy: Strategy = "cosine"
    interval: int = 1
    min_context: int = 64
    sinks: int = 4
    distance_weight: float = 1.2
    floor: int = 0

    window = 1

    def __post_init__(self) -> None:
        for name, fine, range_ in (
            ("rate", 0 < self.rate <= 1, "(0, 1]"),
            ("recent", 0 <= self.recent < 1, "[0, 1)"),
            ("distance_weight", 0 < self.distance_weight < math.inf, "(0, inf)"),
        ):
            if not fine:
                raise PlanError(f"PyramidInfer: {name} must lie in {range_}, got {getattr(self, name)!r}")
        if not self.recent:
            refuse_unused(self, "recent=0", "distance_weight")
        check_int(self, "interval", self.interval, 1)
        check_int(self, "sinks", self.sinks, 0)
        check_int(self, "floor", self.floor, 0)
        check_int(self, "min_context", self.min_context, self.sinks)

    def source(self, num_layers: int) -> int:
        # Layer 0 passes everything on.
        if self.interval >= num_layers - 1:
            raise PlanError(
                f"PyramidInfer first drops after layer {self.interval}, the model has {num_layers} layers: interval "
                f"must lie in 1..{num_layers - 2}"
            )
        return self.interval

    def queries(self, length: int) -> int:
        return int(length * self.recent) + 1

    def share(self, layer: int, num_layers: int, layers: tuple[int, ...] = ()) -> float:
        """Return the share of its context that a layer passes on.

        layers: those that can choose, () for all; if an `interval`-th layer cannot, the next one that can does.
        """
        before = max((other for other in layers or range(num_layers) if other < layer), default=-1)
        due = any(place % self.interval == 0 for place in range(max(before + 1, 1), layer + 1))
        if not due or layer == num_layers - 1:
            return 1.0
        depth = layer / num_layers
        left = (1 + math.cos(math.pi * depth)) / 2 if self.strategy == "cosine" else 1 - depth
        return (1 - self.rate) * left + self.rate

    def passed_on(self, length: int, tail: int, share: float) -> int:
        kept = int((length - tail) * share)
        return min(length, max(tail + kept, self.floor)) if kept > self.min_context else length

    def select(self, ctx: LayerContext) -> Selection | None:
        offered = ctx.offered_counts
        share = self.share(ctx.layer_idx, ctx.num_layers, ctx.layers)
        ctx.shared.setdefault("report", {}).setdefault("layer_tokens", []).append(max(offered))
        tails = [self.queries(length) for length in ctx.step.turn_lengths]
        counts = tuple(self.passed_on(length, tail, share) for length, tail in zip(offered, tails, strict=True))
        if counts == offered:
            return None
        # The offered tokens, counted from the right end.
        from_end = torch.arange(ctx.offered, 0, -1, device=ctx.keys.device)[None]
        if ctx.valid is not None:
            # Padding precedes each chunk's tokens, and counts as farther from the end than all of them.
            real = ctx.valid[:, 0, -ctx.offered :]
            from_end = real.flip(-1).cumsum(-1).flip(-1).masked_fill(~real, ctx.offered + 1)
        dtype = score_dtype(ctx.query.dtype)
        tail, length = (
            torch.tensor(part, dtype=dtype)[:, None].to(ctx.keys.device, non_blocking=True) for part in (tails, offered)
        )
        weights = 1 + (self.distance_weight - 1) * (tail - from_end) / (tail - 1).clamp_min(1)
        weights = weights.masked_fill(from_end > tail, 0)[:, -max(tails) :]
        always = from_end <= tail
        if ctx.step.turn_start == 0:
            always = always | (from_end > length - self.sinks)
        scores = ctx.ranks.mean(_tail_mass(ctx, weights)[:, -ctx.offered :]).masked_fill(always, float("inf"))
        ranking, counts = apply_protection(
            ctx, scores.masked_fill(from_end > length, float("-inf"))[:, None], counts, insist=True
        )
        return select_top(ranking[:, 0], counts)


def _tail_mass(ctx: LayerContext, weights: Tensor) -> Tensor:
    """Return the attention mass of the last T queries on the entries, mean over all heads, [B, N].

    weights: of the queries, [B, T]; those of weight 0 may be padding.
    """
    dtype = score_dtype(ctx.query.dtype)
    batch, query_heads, _, dim = ctx.query.shape
    heads, length = ctx.keys.shape[1:3]
    groups = query_heads // heads
    sinks = sinks_of(ctx, heads, groups, 1)
    first = length - weights.shape[1]
    keys = ctx.keys.to(dtype).transpose(-1, -2)
    out = torch.zeros(batch, length, dtype=dtype, device=keys.device)
    block = max(1, _BLOCK_ELEMENTS // (batch * query_heads * length))
    for start in range(first, length, block):
        end = min(start + block, length)
        rows = ctx.query[:, :, start - length :][:, :, : end - start].to(dtype) * ctx.scale
        logits = cap(rows.reshape(batch, heads, -1, dim) @ keys[..., :end], ctx)
        slots = torch.arange(start, end, device=keys.device)
        logits[..., start:].masked_fill_(slots > slots.repeat(groups)[:, None], float("-inf"))
        if ctx.valid is not None:
            logits.masked_fill_(~ctx.valid[:, :, None, :end], float("-inf"))
        weight = weights[:, start - first : end - first].repeat(1, groups)[:, None, :, None]
        extra = None if sinks is None else sinks.expand(-1, -1, end - start).reshape(heads, -1, 1)
        mass = softmax(logits, extra).masked_fill_(weight == 0, 0)
        out[:, :end] += (weight.transpose(-1, -2) @ mass)[:, :, 0].sum(1) / query_heads
    return out


@register_method(
    "pyramidinfer",
    title="PyramidInfer",
    paper="arXiv 2405.12532",
    phase="prefill, end of prompt",
    derive=defaults.pooling,
)
@dataclass(frozen=True, kw_only=True)
class PyramidInferParameters(Parameters):
    """Propagate fewer tokens from layer to layer; with `budget`, evict by SnapKV, too."""

    rate: float = 0.9
    recent: float = 0.2
    strategy: Strategy = "cosine"
    interval: int = 1
    min_context: int = 64
    sinks: int = 4
    distance_weight: float = 1.2
    budget: Budget | str | int | float | None = None
    window: int = 32
    kernel: Kernel = 7
    floor: int = 0

    def plan(self) -> Plan:
        return Plan(propagate=self.role(PyramidInfer), evict=None if self.budget is None else self.role(SnapKV))
