"""H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (arXiv 2306.14048).

Kept: the most recent entries, and "heavy hitters", those with the largest softmax mass in a KV head, summed over every
query of the prompt and every generated token. The sums move with their entries.

The defaults are the paper's: half of the budget for recent entries, eviction in every step.

Differences from the reference: exact causal mass in blocks of queries, without an N x N matrix; group queries are
summed; padded batches; `every` may evict in blocks. Sums favour early entries, which more queries have seen, as in the
paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import group_mean, mass_of
from kvsieve.core.selection import select_top
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, apply_protection, check_share, last_real, skips
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, Selection

_BLOCK = 256


def received_mass(ctx: LayerContext) -> Tensor:
    """Return the mass that each entry received from this pass's queries, [B, H, N], group mean, causal."""
    return group_mean(query_head_mass(ctx), ctx.keys.shape[1])


def query_head_mass(ctx: LayerContext) -> Tensor:
    """Return the mass that each entry received from each query head of this pass, [B, Hq, N], causal."""
    length = ctx.keys.shape[2]
    new = ctx.query.shape[2]
    total: Tensor | None = None
    for start in range(0, new, _BLOCK):
        stop = min(start + _BLOCK, new)
        mass = mass_of(ctx, start, stop)
        if total is None:
            total = mass.new_zeros(*mass.shape[:2], length)
        total[..., : mass.shape[-1]] += mass
    assert total is not None
    return total


def moved(mass: Tensor, index: Tensor, to: Tensor) -> Tensor:
    """Move the mass of tokens to their current slots, which encoding changes if rows have different lengths.

    Args:
        mass: [B, H, M].
        index: int32 [B, H, M], the token of each; -1 for filler.
        to: int32 [B, H, N], the same for the current slots.

    Returns:
        [B, H, N], 0 for tokens without mass so far.
    """
    known, order = index.sort(-1)
    place = torch.searchsorted(known, to.contiguous()).clamp_max(known.shape[-1] - 1)
    same = (known.gather(-1, place) == to) & (to >= 0)
    return mass.gather(-1, order.gather(-1, place)).masked_fill(~same, 0)


def add_mass(ctx: LayerContext, mass: Tensor, name: str = "mass", decay: Tensor | None = None) -> None:
    """Add this pass's mass to the layer's ``ctx.state[name]``, with the entries' tokens in its index.

    Args:
        ctx: the layer.
        mass: [B, H, N] or [B, Hq, N], which is changed.
        name: of the mass in the state; its tokens are in "index" for "mass", else in ``name + "_index"``.
        decay: [B, 1, 1], factor of the mass so far. Default None: 1.
    """
    before = ctx.state.get(name)
    index = _tokens(ctx, mass.shape[1])
    if before is not None:
        known = ctx.state[_index_of(name)]
        if not torch.equal(known, index[..., : known.shape[-1]]):
            before = moved(before, known, index)
        mass[..., : before.shape[-1]] += before if decay is None else before * decay
    ctx.state[name], ctx.state[_index_of(name)] = mass, index.clone()


def mass_now(ctx: LayerContext, name: str = "mass") -> Tensor:
    """Return the mass that `add_mass` stored, for the entries of this context, in its shape."""
    mass = ctx.state[name]
    known = ctx.state[_index_of(name)]
    index = _tokens(ctx, mass.shape[1])
    # Other devices would wait for the comparison.
    return mass if mass.device.type == "cpu" and torch.equal(known, index) else moved(mass, known, index)


def _tokens(ctx: LayerContext, heads: int) -> Tensor:
    """Return the token of each entry, int32 [B, heads, N], -1 for padding and filler."""
    index = ctx.index if ctx.valid is None else ctx.index.masked_fill(~ctx.valid, -1)
    return index.repeat_interleave(heads // index.shape[1], 1)


def _index_of(name: str) -> str:
    return "index" if name == "mass" else f"{name}_index"


@register_method("h2o", title="H2O", paper="arXiv 2306.14048", phase="end of prompt, decode", budget="20%")
@dataclass(frozen=True, kw_only=True)
class H2O(ScoredEvictor, heads="own", query_aware=True):
    """Keep recent entries and the entries with the most attention so far.

    recent: share of the budget, without protected entries, for the most recent entries, in [0, 1]; the paper uses half.
    """

    every: int | None = 1
    recent: float = 0.5

    def __post_init__(self) -> None:
        check_share(self, "recent", self.recent)
        super().__post_init__()

    @property
    def minimum(self) -> int:
        return 2

    @property
    def why_minimum(self) -> str:
        return "a recent entry and a heavy hitter"

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        if "mass" not in ctx.state:
            self.observe(ctx)
        mass = ctx.state["mass"]
        kept = tuple(min(count, stored) for count, stored in zip(counts, ctx.stored, strict=True))
        if kept == ctx.stored:
            return None
        scores = mass if ctx.valid is None else mass.masked_fill(~ctx.valid, float("-inf"))
        scores, kept = apply_protection(ctx, scores, kept)
        free = ctx.protected is None and ctx.quotas is None
        must = [0] * len(kept) if free else scores.isposinf().sum(-1).amax(-1).tolist()
        scores, most = scores.clone(), torch.finfo(scores.dtype).max
        for row, count in enumerate(kept):
            recent = last_real(ctx, int((count - must[row]) * self.recent))
            scores[row].masked_fill_(recent[row if len(recent) > 1 else 0] & ~scores[row].isposinf(), most)
        selection = select_top(scores, kept)
        ctx.state["mass"] = mass.gather(-1, selection.indices)
        ctx.state["index"] = ctx.state["index"].gather(-1, selection.indices)
        return selection

    def observe(self, ctx: LayerContext) -> None:
        if not skips(self.skip_layers, ctx):
            add_mass(ctx, received_mass(ctx))
