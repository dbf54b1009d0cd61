"""WindowKV: Task-Adaptive Group-Wise KV Cache Window Selection for Efficient LLM Inference (arXiv 2503.17922).

The context before the last `window` tokens is cut into windows of `length` tokens. A window scores the mean of its
tokens' attention from those last tokens, or with ``rule="max"`` that of its better half; the best windows stay, the
same ones for all heads. The first of every `share` layers chooses for its group, and budgets fall linearly from the
first group to the last, which gets share / beta of the average.

Differences from the reference: `rule` is given, where the original's trained classifier finds it from the prompt; the
better half is that of each KV head's scores, after the mean of its query heads; the budget is met to the entry, so only
the first tokens of the last window stay; the number of layers need not be a multiple of `share`; the observing tokens
count in the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvsieve.core.allocation import allocate
from kvsieve.lazy import Tensor
from kvsieve.methods.allocators import LayerAllocator
from kvsieve.methods.base import ScoredEvictor, check_int, keep_best, same_in_layers, skips
from kvsieve.methods.chunkkv import Chunks, best_first
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, Selection

Rule = Literal["average", "max"]


@dataclass(frozen=True, kw_only=True)
class WindowKV(LayerAllocator, heads="all", query_aware=False):
    """Keep windows of consecutive tokens by `base`'s scores, the same ones in groups of layers: ``WindowKV()``.

    base: ranks entries and has the budget, the mean over layers. length: tokens of a window. rule: mean of a window's
    scores ("average"), or of the better half of them ("max"). share: layers of a group. beta: the last group gets
    share / beta of the average, at least 1.
    """

    base: ScoredEvictor = SnapKV(budget=Budget(ratio=0.2), kernel=1)
    length: int = 8
    rule: Rule = "max"
    share: int = 8
    beta: int = 14

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("length", "share", "beta"):
            check_int(self, name, getattr(self, name), 1)

    def divide(self, layers: Sequence[int], length: int, count: int, floor: int) -> list[int]:
        groups = [place // self.share for place in range(len(layers))]
        rest = count - self.spare
        last = min(rest * self.share / self.beta, rest)
        step = 2 * (rest - last) / max(groups[-1], 1)
        line = [2 * rest - last - group * step for group in groups]
        bounds = [max(floor - self.spare, 0)] * len(layers), [max(length, count) - self.spare] * len(layers)
        shares = allocate(line if groups[-1] else [1] * len(layers), rest * len(layers), *bounds)
        return [self.spare + share for share in shares]

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        def make() -> Tensor:
            chunks = Chunks.of(ctx, self.base.scores(ctx), self.length)
            means = chunks.means() if self.rule == "average" else self._better_half(chunks)
            return chunks.ranks(-best_first(means)[..., None].expand_as(chunks.judged))

        return same_in_layers(ctx, self.skip_layers, self.share, make).expand(-1, ctx.keys.shape[1], -1)

    def _better_half(self, chunks: Chunks) -> Tensor:
        """Return the mean of the better half of a window's scores, summed over heads, [B, C]."""
        ordered = chunks.scores.masked_fill(~chunks.judged[:, None], float("-inf")).sort(-1, descending=True).values
        best = ordered[..., : max(self.length // 2, 1)]
        counted = ~best.isneginf()
        total = best.masked_fill(~counted, 0).sum((1, 3))
        return (total / counted[:, 0].sum(-1)).masked_fill(chunks.sizes == 0, float("-inf"))

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        return keep_best(self, ctx, self.layer_counts(ctx, counts))


@register_method("windowkv", title="WindowKV", paper="arXiv 2503.17922", phase="end of prompt")
def windowkv(
    budget: Budget | str | int | float = "20%",
    length: int = 8,
    rule: Rule = "max",
    share: int = 8,
    beta: int = 14,
    window: int = 32,
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Keep windows of adjacent entries, chosen once per group of layers, with budgets that fall with depth."""
    base = SnapKV(
        budget=Budget.parse(budget),
        window=window,
        kernel=1,
        skip_layers=skip_layers,  # type: ignore[arg-type]
        every=every,
    )
    return Plan(evict=WindowKV(base=base, length=length, rule=rule, share=share, beta=beta))
