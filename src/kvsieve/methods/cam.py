"""CaM: Cache Merging for Memory-efficient LLMs Inference (ICML 2024, openreview LCTmppB165).

While decoding, an entry i that `base` drops leaves its value to the `span` kept entries j that follow it. With
probability ``min(1, A_i / mean A_j)`` each of them gets an equal part of the value, ``v_j += v_i / span``. A is the
attention received so far from generated tokens. Keys stay. At the end of a prompt entries are dropped.

The public code merges one entry per step; kvpress's CAMPress merges as many as were generated since. Both are `every`.

Differences from the reference: one draw per KV head, with the group's mean attention; fewer than `span` entries share
the value of one near the end; the draws are a hash of `seed`, layer, head and position, so that they depend neither on
the batch nor on the machine; protected entries get nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvsieve.core.merging import Parted, collect
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int, positions, scored_by_name, skips
from kvsieve.methods.h2o import add_mass, mass_now, received_mass
from kvsieve.methods.merged import Merge, Merged, merge_rule
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, When

_MASS = "generated_mass"
_BITS = 24
_WORD = 1 << 64


@merge_rule("cam")
@dataclass(frozen=True, kw_only=True)
class CaM(Merged, heads="own", query_aware=True):
    """Add values of entries dropped while decoding to the kept entries after them: ``CaM(base=SnapKV(..., every=16))``.

    span: entries that share a value. seed: of the draws.
    """

    span: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "span", self.span, 1)
        check_int(self, "seed", self.seed, 0)

    @property
    def when(self) -> When:
        return dataclasses.replace(self.base.when, observes=True)

    def observe(self, ctx: LayerContext) -> None:
        if self.base.when.observes:
            super().observe(ctx)
        if ctx.step.phase == "decode" and not skips(self.skip_layers, ctx):
            add_mass(ctx, received_mass(ctx), _MASS)

    def merge(self, ctx: LayerContext, parted: Parted) -> Merge | None:
        if ctx.step.phase == "prefill" or _MASS not in ctx.state:
            return None
        mass = mass_now(ctx, _MASS)
        own = mass.gather(2, parted.kept)
        # Places of the kept entries that may change, in order, and their number before each dropped entry.
        order = (~parted.open).to(torch.uint8).argsort(dim=-1, stable=True)
        number = parted.open.sum(-1, keepdim=True)
        changes = torch.zeros_like(parted.fixed, dtype=torch.int64)
        changes = changes.scatter_add(2, parted.kept, parted.open.long()).cumsum(-1)
        first = changes.gather(2, parted.dropped)
        shares = []
        for step in range(self.span):
            inside = (first + step < number) & parted.merging
            shares.append((inside, order.gather(2, (first + step).clamp_max(order.shape[-1] - 1))))
        count = torch.stack([inside for inside, _ in shares]).sum(0).to(mass.dtype)
        around = torch.stack([own.gather(2, place) * inside for inside, place in shares]).sum(0) / count.clamp_min(1)
        chance = (mass.gather(2, parted.dropped) / around).nan_to_num(0.0, posinf=1.0).clamp(0, 1)
        drawn = self._draws(ctx).gather(2, parted.dropped) < chance
        values, others = parted.values(ctx)
        part = others * (drawn / count.clamp_min(1))[..., None]
        size = values.shape[2]
        for inside, place in shares:
            values = values + collect(part * inside[..., None], place, size)
        return Merge(values=values)

    def _draws(self, ctx: LayerContext) -> Tensor:
        """Return a number in [0, 1) for each entry, float64 [B, H, N]: a hash (splitmix64) of its position."""
        heads = ctx.keys.shape[1]
        head = torch.arange(heads, device=ctx.keys.device) + ctx.ranks.rank * heads
        start = _signed((self.seed + 1) * 0x9E3779B97F4A7C15 + ctx.layer_idx * 0xD1B54A32D192ED03)
        bits = positions(ctx) * _signed(0x9E3779B97F4A7C15) + (head * _signed(0x8CB92BA72F3D8DD7) + start)[:, None]
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
        bits = bits ^ ((bits >> 31) & ((1 << 33) - 1))
        return ((bits >> (64 - _BITS)) & ((1 << _BITS) - 1)).double() / (1 << _BITS)


def _signed(number: int) -> int:
    number %= _WORD
    return number - _WORD if number >= _WORD // 2 else number


@register_method("cam", title="CaM", paper="ICML 2024", phase="decode")
def cam(
    budget: Budget | str | int | float = "20%",
    base: str = "streamingllm",
    span: int = 32,
    seed: int = 0,
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = 1,
) -> Plan:
    """Add values of entries that another method, `base`, drops while decoding to the kept entries after them."""
    return Plan(evict=CaM(base=scored_by_name("cam", base, budget, skip_layers, every), span=span, seed=seed))
