"""HeadKV: Not All Heads Matter, KV Cache Compression with Integrated Retrieval and Reasoning (arXiv 2410.19258).

Every head gives 1 / `beta` of its budget b, without the window, to a pool that heads of all layers share in proportion
to their importance, measured once per model: head h keeps b - b // beta + share_h * pool entries, its best by SnapKV's
scores, and the window. Heads store different numbers of entries.

Differences from the reference: importance is that of a profile (`kvsieve calibrate`): attention on copies of the
answer's tokens, as for the paper's retrieval heads, without its reasoning examples; there is one budget and one set per
KV head, with the group's mean taken before pooling; no head gets more entries than the prompt has, and the total is met
to the entry; `every=n` cuts each head to its own size again during decode.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvsieve.core.allocation import allocate
from kvsieve.core.scoring import Kernel, Pool
from kvsieve.errors import PlanError
from kvsieve.methods.adakv import GroupedSnapKV
from kvsieve.methods.allocators import HeadAllocator
from kvsieve.methods.arrays import check_heads, set_numbers
from kvsieve.methods.base import ScoredEvictor
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Heads, Profile, array_of
from kvsieve.planning.registry import Parameters, register_method

_BASE = GroupedSnapKV(budget=Budget(ratio=0.2))


@dataclass(frozen=True, kw_only=True)
class HeadKV(HeadAllocator, heads="own", ragged=True, query_aware=False):
    """Divide the budget among the heads of all layers by their importance: ``HeadKV(heads=scores)``.

    base: ranks entries and has the budget, the mean over heads and layers. heads: a score per layer and KV head, at
    least 0, higher for important ones. beta: a head's budget over its part of the pool, at least 1; 1 leaves all to
    importance. temperature: exponent of the scores, at least 0; 0 is uniform.
    """

    heads: Heads = field(repr=False)
    base: ScoredEvictor = _BASE
    beta: float = 1.2
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_numbers(self, "heads", "[layers][heads]")
        if not self.beta >= 1:
            raise PlanError(f"HeadKV: beta must be at least 1, got {self.beta!r}")
        if not self.temperature >= 0:
            raise PlanError(f"HeadKV: temperature must be at least 0, got {self.temperature!r}")

    def check_heads(self, layers: int, heads: int) -> None:
        check_heads(self, "scores", self.heads, layers, heads)

    def head_counts(self, layers: Sequence[int], length: int, count: int) -> list[list[int]]:
        """Return the entries of each head of `layers` for a row of `length` tokens, `count` on average."""
        weights = [max(score, 0.0) ** self.temperature for layer in layers for score in self.heads[layer]]
        rest = max(count - self.spare, 0)
        pool = int(rest // self.beta)
        sure = count - pool
        room = [max(length, count) - sure] * len(weights)
        shares = iter(allocate(weights, pool * len(weights), [0] * len(weights), room))
        return [[sure + next(shares) for _ in self.heads[layer]] for layer in layers]


@register_method("headkv", title="HeadKV", paper="arXiv 2410.19258", phase="end of prompt", part="heads")
@dataclass(frozen=True, kw_only=True)
class HeadKVParameters(Parameters):
    """SnapKV with one budget for the heads of all layers, shared by their retrieval scores; needs a model's profile."""

    budget: Budget | str | int | float = "20%"
    profile: Profile | str | os.PathLike[str] | None = None
    beta: float = 1.2
    window: int = 32
    kernel: Kernel = 7
    pooling: Pool = "max"
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = None

    def plan(self) -> Plan:
        heads, model = array_of("heads", "headkv", self.profile)
        return Plan(evict=self.role(HeadKV, base=self.role(GroupedSnapKV), heads=heads), profile=model)
