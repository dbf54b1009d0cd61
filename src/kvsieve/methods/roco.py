"""RoCo: On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model Inference (2402.06262).

For each entry of a KV head: mean and standard deviation of the attention weights it has received, from its own query on
(group mean). Entries with stable, low attention go: of a budget of C entries, the C - `recent` C with the smallest
standard deviations are candidates, and of these the smallest means are evicted. The `newest` entries and the first
`sinks` are never candidates. After every token one entry is evicted.

Differences from the reference (EasyKV): exact statistics of the whole prompt, evicted from at its end at once, where
the original prefills by strides; padded batches; `every` may evict in blocks. The original's sinks stay in prompts
only: there an answer's budget is its own, as with `answer=`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.selection import top_mask
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, check_int, check_share, first_real, keep_best, last_real, skips
from kvsieve.methods.decoding import carried, weights_by_block
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, Selection

_NAMES = ("mass", "squares", "queries")


@register_method("roco", title="RoCo", paper="arXiv 2402.06262", phase="end of prompt, decode", budget="20%")
@dataclass(frozen=True, kw_only=True)
class RoCo(ScoredEvictor, heads="own", query_aware=True):
    """Evict the entries with the least mean attention among those where it varies least.

    recent: share of the budget that is no candidate, those with the largest deviations, in [0, 1]. newest, sinks: last
    and first entries that always stay.
    """

    stays = ("sinks", "newest")

    every: int | None = 1
    recent: float = 0.3
    newest: int = 10
    sinks: int = 4

    def __post_init__(self) -> None:
        check_share(self, "recent", self.recent)
        check_int(self, "newest", self.newest, 1)
        check_int(self, "sinks", self.sinks, 0)
        super().__post_init__()

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        count = ctx.state["queries"].clamp_min(1)
        mean = ctx.state["mass"] / count
        spread = (ctx.state["squares"] / count - mean.square()).clamp_min(0).sqrt()
        held = first_real(ctx, self.sinks) | last_real(ctx, self.newest)
        stays = held if ctx.protected is None else held | ctx.protected
        fixed = [0] * len(kept) if ctx.protected is None else ctx.protected.sum(-1).amax(-1).tolist()
        candidates = []
        for stored, count_kept, must in zip(ctx.stored, kept, fixed, strict=True):
            free = max(count_kept - must, 0)
            candidates.append(max(free - int(free * self.recent), stored - count_kept))
        steady = (-spread).masked_fill(stays, float("-inf"))
        if ctx.valid is not None:
            steady = steady.masked_fill(~ctx.valid, float("-inf"))
        chosen = top_mask(steady, tuple(candidates)) & ~steady.isneginf()
        # Weights are at most 1: the others rank above every mean.
        return torch.where(chosen, mean, 2).masked_fill(held, float("inf"))

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        if "mass" not in ctx.state:
            self.observe(ctx)
        selection = keep_best(self, ctx, counts)
        if selection is not None:
            for name in ("index", *_NAMES):
                ctx.state[name] = ctx.state[name].gather(-1, selection.indices)
        return selection

    def observe(self, ctx: LayerContext) -> None:
        if skips(self.skip_layers, ctx):
            return
        found = dict(zip(_NAMES, received(ctx), strict=True))
        index = ctx.index if ctx.valid is None else ctx.index.masked_fill(~ctx.valid, -1)
        for name, new in found.items():
            before = ctx.state.get(name)
            ctx.state[name] = new if before is None else new + carried(before, ctx.state["index"], index)
        ctx.state["index"] = index.clone()


def received(ctx: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums and sums of squares of the weights that entries get from this pass's queries, and how many ask.

    Returns:
        Each [B, H, N], group mean, causal.
    """
    batch, heads, length = ctx.keys.shape[:3]
    new = ctx.query.shape[2]
    parts: list[Tensor] = []
    for _, part, weights in weights_by_block(ctx):
        mean = weights.mean(2)
        if not parts:
            parts = [mean.new_zeros(batch, heads, length) for _ in _NAMES]
        parts[0][..., part] += mean.sum(2)
        parts[1][..., part] += mean.square().sum(2)
    real = torch.ones_like(parts[2][..., -new:]) if ctx.valid is None else ctx.valid[:, :, -new:].to(parts[2].dtype)
    parts[2][..., : length - new] = real.sum(-1, keepdim=True)
    parts[2][..., length - new :] = real.flip(-1).cumsum(-1).flip(-1)
    return parts[0], parts[1], parts[2]
