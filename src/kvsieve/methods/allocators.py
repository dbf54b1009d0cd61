"""Base classes of methods that divide a budget unevenly among layers or heads.

The total does not change: it is the budget times the layers that evict, per row, to the entry. No layer gets less than
its base needs, or more than it stores; the excess goes to the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvsieve.core.allocation import allocate, water_fill
from kvsieve.core.selection import pack, pack_ragged, top_mask
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, Wrapper, apply_protection, hide_padding, keep_best, skipped, skips
from kvsieve.planning.roles import Traits
from kvsieve.types import LayerContext, Selection

_ENDLESS = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Allocator(Wrapper):
    """A Wrapper that changes how many entries `base` keeps per layer or head, for a prompt and the decode after it."""

    @property
    def spare(self) -> int:
        """Entries that every layer keeps in any case, such as a window or sinks, and that are not divided."""
        return self.base.minimum - 1

    def is_noop(self, layer_idx: int, num_layers: int, stored: tuple[int, ...], state: dict[str, Any]) -> bool:
        # The base's message would name other numbers of entries than its layers or heads keep here.
        return False

    def acting(self, ctx: LayerContext) -> list[int]:
        layers = ctx.layers or range(ctx.num_layers)
        return [index for index in layers if not skipped(self.skip_layers, index, ctx.num_layers)]

    def remembered(self, ctx: LayerContext, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return this layer's entries at the end of the prompt; `counts` if nothing was allocated.

        A row no longer than the floor keeps all entries.
        """
        shares = ctx.state.get("allocated")
        if shares is None:
            return counts
        whole = (length <= self.budget.floor for length in ctx.step.lengths)
        return tuple(
            stored if all_stay else count
            for stored, all_stay, count in zip(ctx.stored, whole, shares.tolist(), strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class LayerAllocator(Allocator):
    """An Allocator with shares known in advance, so that each layer evicts independently."""

    def divide(self, layers: Sequence[int], length: int, count: int, floor: int) -> list[int]:
        """Return each layer's entries for a row of `length` tokens, `count` on average and at least `floor`."""
        raise NotImplementedError

    def layer_counts(self, ctx: LayerContext, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the entries that this layer keeps per row, including those unused by shorter earlier layers."""
        if ctx.step.phase == "decode":
            return self.remembered(ctx, counts)
        acting = self.acting(ctx)
        place = acting.index(ctx.layer_idx)
        owed = ctx.shared.setdefault("owed", [0] * len(counts))
        wanted = []
        later = []
        for row, (count, length, must) in enumerate(zip(counts, ctx.step.lengths, _asked(ctx), strict=True)):
            floor = min(count, max(self.minimum, must))
            share = self.divide(acting, length, count, floor)[place]
            taken = min(share + owed[row], ctx.stored[row])
            wanted.append(share + owed[row])
            owed[row] += share - taken
            # A prompt within the budget leaves the rest to generated tokens.
            later.append(taken if length > count else share)
        ctx.state["allocated"] = torch.tensor(later)
        return tuple(wanted)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        return keep_best(self.base, ctx, self.layer_counts(ctx, counts))


@dataclass(frozen=True, kw_only=True)
class RaggedAllocator(Allocator, ragged=True):
    """An Allocator under which heads keep different numbers of entries, of each row in ``ctx.state["heads"]``."""

    @property
    def traits(self) -> Traits:
        # As for AdaKV: heads with different entries cannot be compared slot by slot.
        traits = super().traits
        return traits if self.base.traits.heads == "own" else replace(traits, heads=None)

    def select_again(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        """Reduce heads to their numbers of entries in ``ctx.state["heads"]``, [B, 1 or H], during decode."""
        heads = ctx.state.get("heads", torch.tensor(counts)[:, None])
        stored = ctx.valid if ctx.valid is not None else torch.ones_like(ctx.index, dtype=torch.bool)
        if bool((stored.sum(-1).cpu() <= heads.cpu()).all()):
            return None
        return self.keep_per_head(ctx, counts, heads.cpu())

    def keep_per_head(self, ctx: LayerContext, counts: tuple[int, ...], heads: Tensor) -> Selection:
        """Keep the best entries by the base's scores, ``heads[b, h]`` in each head, and protected ones.

        heads: int64 [B, 1 or H], on the host, which waits for the device only if there is padding.
        """
        scores, _ = apply_protection(ctx, hide_padding(ctx, self.base.scores(ctx)), counts)
        heads = heads.repeat_interleave(scores.shape[1] // heads.shape[1], 1)
        if ctx.valid is None and ctx.protected is None and ctx.quotas is None:
            heads = heads.clamp(max=scores.shape[2])
            return pack_ragged(top_mask(scores, heads), heads.tolist())
        heads = torch.maximum(heads.to(scores.device), scores.isposinf().sum(-1))
        return pack_ragged(top_mask(scores, heads) & ~scores.isneginf())


@dataclass(frozen=True, kw_only=True)
class HeadAllocator(RaggedAllocator):
    """An Allocator that divides the budget of all layers among their heads, by shares known in advance."""

    def check_heads(self, layers: int, heads: int) -> None:
        """Raise PlanError unless the shares are those of a model of `layers` layers with `heads` KV heads each."""
        raise NotImplementedError

    def check_layer(self, index: int, num_layers: int, heads: int, query_heads: int, dim: int) -> None:
        self.check_heads(num_layers, heads)

    def head_counts(self, layers: Sequence[int], length: int, count: int) -> list[list[int]]:
        """Return the entries of each head of `layers` for a row of `length` tokens, `count` on average."""
        raise NotImplementedError

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        heads = ctx.keys.shape[1] * ctx.ranks.size
        self.check_heads(ctx.num_layers, heads)
        if skips(self.skip_layers, ctx):
            return None
        if ctx.step.phase == "decode":
            return self.select_again(ctx, counts)
        own = ctx.ranks.own(heads)
        acting = self.acting(ctx)
        rows = []
        for length, count in zip(ctx.step.lengths, counts, strict=True):
            if length <= count:
                # The unused budget is for generated tokens, the same in every head.
                rows.append([count] * ctx.keys.shape[1])
                continue
            known = ctx.shared.setdefault("head_counts", {})
            if (length, count) not in known:
                known[length, count] = self.head_counts(acting, length, count)
            rows.append(known[length, count][acting.index(ctx.layer_idx)][own])
        budgets = torch.tensor(rows)
        ctx.state["heads"] = budgets
        if all(min(row) >= stored for row, stored in zip(rows, ctx.stored, strict=True)):
            return None
        return self.keep_per_head(ctx, counts, budgets)


@dataclass
class LayerScores:
    """A layer of this pass in its current state.

    scores: [B, X, n] of the stored entries, +inf for those that must stay, -inf for filler. Per row: counts, entries
    requested; floors, fewest to keep; stored, number of entries; weights, weight of the layer. state: the layer's own.
    even: all heads store the same number.
    """

    index: int
    scores: Tensor
    counts: list[int]
    floors: list[int]
    stored: list[int]
    weights: list[float]
    state: dict[str, Any]
    even: bool

    def cut(self, kept: list[int]) -> Selection:
        best = top_mask(self.scores, tuple(kept))
        chosen = pack(best, tuple(kept)) if self.even else pack_ragged(best & ~self.scores.isneginf())
        scores = self.scores.gather(-1, chosen.indices)
        real = chosen.real_of_heads()
        if real is not None:
            scores = scores.masked_fill(~real, float("-inf"))
        self.scores = scores
        self.stored = kept
        return chosen


@dataclass(frozen=True, kw_only=True)
class Cascade(Allocator, recuts=True):
    """An Allocator that weighs layers as they come, and shrinks earlier ones for later ones.

    After each layer the whole total is divided among the layers so far. No more than that is ever stored, except the
    layer that attends and an entry per layer and head for rounding. A later layer only lowers the shares of the others,
    so the result is the same as dividing once after the last layer. Rows that store at most the budget in a layer keep
    everything there.
    """

    # True to keep everything until the last layer.
    defer_until_last_layer: ClassVar[bool] = False
    # True if weights depend on the entries' scores, so that `LayerScores` needs those of all ranks' heads.
    compares: ClassVar[bool] = False

    def weigh(self, ctx: LayerContext) -> list[float]:
        raise NotImplementedError

    def weights(self, seen: Sequence[LayerScores], row: int) -> list[float]:
        """Return the weights of the layers so far, by which a row's budget is divided."""
        return [layer.weights[row] for layer in seen]

    def least(self, budget: int) -> int:
        """Return the part of a layer's `budget`, without `spare`, that it keeps at any weight."""
        return 0

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:  # type: ignore[override]
        if skips(self.skip_layers, ctx):
            return None
        if ctx.step.phase == "decode":
            return keep_best(self.base, ctx, self.remembered(ctx, counts))
        seen: list[LayerScores] = ctx.shared.setdefault("seen", [])
        seen.append(self._look_at(ctx, counts))
        ahead = len(self.acting(ctx)) - len(seen)
        rows = [self.targets(seen, row, count * ahead, last=ahead == 0) for row, count in enumerate(counts)]
        if ahead == 0:
            self._remember(seen, rows)
        per_layer = [list(layer) for layer in zip(*rows, strict=True)]
        return {
            layer.index: self._own(ctx, layer.cut(kept))
            for layer, kept in zip(seen, per_layer, strict=True)
            if kept != layer.stored
        }

    def _own(self, ctx: LayerContext, chosen: Selection) -> Selection:
        if not self.compares or ctx.ranks.size == 1:
            return chosen
        # All heads of a layer keep the same number of entries.
        own = ctx.ranks.own(chosen.indices.shape[1])
        return Selection(chosen.indices[:, own], chosen.lengths)

    def targets(self, seen: Sequence[LayerScores], row: int, ahead: int, *, last: bool) -> list[int]:
        """Return the entries to keep in one row of each layer so far; ahead: entries requested for the other layers."""
        stored = [layer.stored[row] for layer in seen]
        if not last and self.defer_until_last_layer:
            return stored
        least = [min(layer.stored[row], self._given(layer.counts[row])) for layer in seen]
        total = sum(layer.counts[row] for layer in seen) + ahead - sum(least)
        bounds = self._less(least, [layer.floors[row] for layer in seen]), self._less(least, stored)
        if last:
            shares = allocate(self.weights(seen, row), total, *bounds)
        else:
            # Rounded up, because the final number may be either.
            shares = [math.ceil(share) for share in water_fill(self.weights(seen, row), total, *bounds)]
        return [count + share for count, share in zip(least, shares, strict=True)]

    def _given(self, count: int) -> int:
        return min(count, self.spare + self.least(max(count - self.spare, 0)))

    @staticmethod
    def _less(counts: Sequence[int], bounds: Sequence[int]) -> list[int]:
        return [max(bound - count, 0) for count, bound in zip(counts, bounds, strict=True)]

    def _look_at(self, ctx: LayerContext, counts: tuple[int, ...]) -> LayerScores:
        kept = tuple(map(min, counts, ctx.stored))
        # Such rows keep everything, and may have too few queries to rank by.
        whole = torch.tensor([count == stored for count, stored in zip(kept, ctx.stored, strict=True)])
        scores = torch.zeros(ctx.keys.shape[:3], device=ctx.keys.device)
        if not bool(whole.all()):
            scores = self.base.scores(ctx)
            if bool(whole.any()):
                scores = scores.masked_fill(whole.to(scores.device, non_blocking=True)[:, None, None], 0)
        scores, kept = apply_protection(ctx, hide_padding(ctx, scores), kept)
        scores = ctx.ranks.gather(scores) if self.compares else scores
        asked = list(map(max, counts, kept))
        must = scores.isposinf().sum(-1).amax(-1).tolist()
        floors = [
            min(stored, max(stored if count >= stored else self.minimum, least))
            for count, stored, least in zip(asked, ctx.stored, must, strict=True)
        ]
        weights = self.weigh(ctx)
        even = ctx.valid is None
        return LayerScores(ctx.layer_idx, scores, asked, floors, list(ctx.stored), weights, ctx.state, even)

    def _remember(self, seen: Sequence[LayerScores], rows: Sequence[Sequence[int]]) -> None:
        """Record each layer's limit during decode: its share, and its part of the budget that the prompt left."""
        later = []
        for row, kept in enumerate(rows):
            total = sum(layer.counts[row] for layer in seen)
            # Prompts may be shorter than the base's minimum.
            least = [max(count, self.minimum) for count in kept]
            later.append(allocate(self.weights(seen, row), total, least, [_ENDLESS] * len(seen)))
        for layer, limits in zip(seen, zip(*later, strict=True), strict=True):
            layer.state["allocated"] = torch.tensor(limits)


def observed(base: ScoredEvictor) -> int:
    """Return the number of last queries that weigh a layer: the base's window, if it has one."""
    return base.window if base.window > 1 else 32


def _asked(ctx: LayerContext) -> list[int]:
    total = torch.zeros(len(ctx.stored), dtype=torch.int64)
    if ctx.protected is not None:
        total = ctx.protected.sum(-1).amax(-1).cpu()
    if ctx.quotas is not None:
        total = total + ctx.quotas.counts.sum(-1).cpu()
    return total.tolist()
