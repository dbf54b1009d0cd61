"""UNComp (arXiv 2410.03090).

Can Matrix Entropy Uncover Sparsity? A Compressor Design from an Uncertainty-Aware Perspective.

By the public code, menik1126/UNComp. The truncated matrix entropy of a head is minus the sum of x log x over the 32
largest eigenvalues x of its queries' covariance. The queries are rotated, centred over a text's tokens and scaled to
length 1; the covariance is scaled to trace 1. Calibration measures the entropies once per model. Each layer's heads are
ranked by entropy and divided into `groups`. Budgets rise linearly from group to group: the highest entropies' is
`spread` times the lowest's, as 512 and 256 in the paper. A head keeps the best entries by the pooled attention of the
last 8 queries, and these queries' own.

`stages` also compresses hidden states ("uncomp_stage" in the code). Layers are divided into S + 1 stages. Those of
stage s compute m + (S - s) * ((n - m) // S) of n tokens, the last stage m (`rate`). Tokens continue by the attention of
the last 8 queries in the layer before, summed over heads.

Differences from the reference: `kvsieve calibrate --parts entropies` ranks heads by their mean entropy on its prompts,
there 100 texts of WikiText-2 vote. Heads are KV heads, with the means over their query heads; there each query head
stores copies. A layer's total is met to the entry, and no head gets more entries than the prompt has. Group sizes
differ by one at most where heads do not divide evenly. Some of its settings have other budgets: 16 and 112 are
`spread=7`. Pooling is that of its LongBench runs; its needle runs have `kernel=5`. It evicts after every token, by
weights recorded when a query was new; `every=1` computes these again over the stored entries.

Stages come from tables by depth there. The script that derives them, at drops of entropy of more than 1 between layers,
does not say which matrix it measured, so it is left out here. "auto" is the table of 22, 32 or 40 layers, or that of 32
scaled to the model's depth. n is the prompt's length, there the model's context: 4096 with m of 1536, 8192 for Llama 3.
The last 8 tokens always continue.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvsieve.core.allocation import allocate
from kvsieve.core.scoring import Kernel, Pool, mass_of
from kvsieve.errors import PlanError, short
from kvsieve.methods.adakv import GroupedSnapKV
from kvsieve.methods.allocators import HeadAllocator
from kvsieve.methods.arrays import check_heads, set_numbers
from kvsieve.methods.base import ScoredEvictor, check_int, refuse_unused
from kvsieve.methods.fastkv import best_offered
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Heads, Profile, array_of
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.planning.roles import Propagator
from kvsieve.types import LayerContext, Selection

_BASE = GroupedSnapKV(budget=Budget(ratio=0.2), window=8)

# First layers of the stages after the first, by depth.
_STAGES = {22: (2, 6, 12, 18), 32: (2, 15, 26, 31), 40: (1, 3, 15, 23, 31, 35, 37)}


@dataclass(frozen=True, kw_only=True)
class UNComp(HeadAllocator, heads="own", query_aware=False):
    """Give heads with a higher entropy of queries a larger budget: ``UNComp(heads=entropies)``.

    base: ranks entries and has the budget, the mean over heads. heads: an entropy per layer and KV head. groups: of
    heads with one budget, at least 1; no more than a layer has heads. spread: the largest budget over the smallest, at
    least 1.
    """

    heads: Heads = field(repr=False)
    base: ScoredEvictor = _BASE
    groups: int = 2
    spread: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_numbers(self, "heads", "[layers][heads]")
        check_int(self, "groups", self.groups, 1)
        if not 1 <= self.spread < float("inf"):
            raise PlanError(f"UNComp: spread must be at least 1, got {self.spread!r}")
        if self.groups == 1:
            refuse_unused(self, "groups=1", "spread")

    def check_heads(self, layers: int, heads: int) -> None:
        check_heads(self, "scores", self.heads, layers, heads)

    def head_counts(self, layers: Sequence[int], length: int, count: int) -> list[list[int]]:
        found = []
        for layer in layers:
            weights = self.weights(layer)
            least = [min(count, self.minimum)] * len(weights)
            found.append(allocate(weights, count * len(weights), least, [max(length, count)] * len(weights)))
        return found

    def weights(self, layer: int) -> list[float]:
        """Return the relative budget of each KV head of a layer, 1 in the group of the lowest entropies."""
        entropies = self.heads[layer]
        heads = len(entropies)
        groups = min(self.groups, heads)
        weights = [1.0] * heads
        for rank, head in enumerate(sorted(range(heads), key=lambda head: (entropies[head], head))):
            weights[head] += (self.spread - 1) * (rank * groups // heads) / max(groups - 1, 1)
        return weights


@dataclass(frozen=True, kw_only=True)
class UNCompStages(Propagator, heads="all", query_aware=True):
    """Pass on fewer tokens from stage to stage of the layers.

    rate: tokens that the last stage computes, including the window; a Budget, a share ("30%", 0.3) or a number (2048)
    of the turn's prompt. stages: first layers of the stages after the first, ascending, as text "2/15/26/31"; "auto"
    for those of the model's depth. window: observing queries at the prompt's end, always passed on.
    """

    rate: Budget
    stages: tuple[int, ...] | str = "auto"
    window: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", Budget.parse(self.rate, "rate"))
        self.rate.refuse_bytes("UNCompStages", "rate", "it counts tokens that deeper layers compute")
        check_int(self, "window", self.window, 1)
        self.rate.refuse_fewer(self.window, "UNCompStages", f"the window of {self.window}", "rate")
        object.__setattr__(self, "stages", self.stages if self.stages == "auto" else _layers(self.stages))

    def starts(self, num_layers: int) -> tuple[int, ...]:
        """Return the first layer of each stage after the first. Raises PlanError if the model lacks one."""
        if isinstance(self.stages, tuple):
            if self.stages[-1] >= num_layers:
                raise PlanError(
                    f"UNCompStages: a stage begins at layer {self.stages[-1]}, and the model has {num_layers} layers: "
                    f"stages must begin at layers 1..{num_layers - 1}"
                )
            return self.stages
        if num_layers in _STAGES:
            return _STAGES[num_layers]
        scaled = {max(round(start * num_layers / 32), 1) for start in _STAGES[32]}
        return tuple(sorted(start for start in scaled if start < num_layers))

    def source(self, num_layers: int) -> int:
        starts = self.starts(num_layers)
        if not starts:
            raise PlanError(f"UNCompStages needs at least 2 layers, the model has {num_layers}: leave stages= out")
        return starts[0] - 1

    def tokens(self, length: int, stage: int, last: int) -> int:
        """Return the tokens of a prompt of `length` that layers of a stage compute, stage 0 to `last`."""
        least = min(self.rate.entries(length, self.window), length)
        return least + (length - least) // last * (last - stage)

    def select(self, ctx: LayerContext) -> Selection | None:
        starts = self.starts(ctx.num_layers)
        # If the layer before a stage cannot choose, the next one that can does.
        before = max((layer for layer in ctx.layers or range(ctx.num_layers) if layer < ctx.layer_idx), default=-1)
        stage, earlier = (sum(start <= layer + 1 for start in starts) for layer in (ctx.layer_idx, before))
        if stage == earlier or ctx.layer_idx == ctx.num_layers - 1:
            return None
        offered = ctx.offered_counts
        lengths = zip(offered, ctx.step.turn_lengths, strict=True)
        counts = tuple(min(count, self.tokens(length, stage, len(starts))) for count, length in lengths)
        if counts == offered:
            return None
        first = ctx.keys.shape[2] - ctx.offered
        window = min(self.window, ctx.query.shape[2])
        return best_offered(ctx, ctx.ranks.mean(mass_of(ctx, -window).mean(1))[:, first:-window], counts)


def _layers(stages: tuple[int, ...] | str) -> tuple[int, ...]:
    """Parse the first layers of stages. Raises PlanError."""
    try:
        parts = [int(part) for part in stages.split("/")] if isinstance(stages, str) else list(stages)
    except (TypeError, ValueError):
        parts = []
    whole = bool(parts) and all(type(part) is int for part in parts)
    if not whole or parts[0] < 1 or parts != sorted(set(parts)):
        raise PlanError(
            "UNCompStages: stages must be 'auto', or the first layers of the stages after the first in ascending "
            f"order, such as (2, 15, 26, 31), as text '2/15/26/31'; got {short(stages)}"
        )
    return tuple(parts)


@register_method("uncomp", title="UNComp", paper="arXiv 2410.03090", phase="end of prompt", part="entropies")
@dataclass(frozen=True, kw_only=True)
class UNCompParameters(Parameters):
    """Give heads with a higher matrix entropy of queries larger budgets; choose as SnapKV; needs a model's profile."""

    budget: Budget | str | int | float = "20%"
    profile: Profile | str | os.PathLike[str] | None = None
    groups: int = 2
    spread: float = 2.0
    stages: tuple[int, ...] | str | None = None
    rate: Budget | str | int | float = 0.375
    window: int = 8
    kernel: Kernel = 7
    pooling: Pool = "max"
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = None

    def plan(self) -> Plan:
        heads, model = array_of("entropies", "uncomp", self.profile)
        if self.stages is None and Budget.parse(self.rate, "rate").ratio != type(self).rate:
            raise PlanError(
                f"uncomp: rate={self.rate} is of the tokens that the last of stages= computes; give stages='auto' as "
                "well, or leave rate= out"
            )
        stages = None if self.stages is None else self.role(UNCompStages)
        evict = self.role(UNComp, base=self.role(GroupedSnapKV), heads=heads)
        return Plan(propagate=stages, evict=evict, profile=model)
