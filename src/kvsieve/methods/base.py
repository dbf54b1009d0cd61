"""The block most evictors share, and small helpers of methods."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.budget import Budget
from kvsieve.core.selection import select_top
from kvsieve.errors import PlanError
from kvsieve.types import LayerContext, Selection, When


@dataclass(frozen=True, kw_only=True)
class ScoredEvictor:
    """An evictor that ranks entries: subclasses give `scores`, this class keeps the best within the budget.

    budget: entries kept per layer and KV head, protected ones included; a Budget or its text ("20%", 2048).
    skip_layers: first layers that keep everything. every: evict again whenever this many tokens have been generated,
    down to what the prompt's length allowed, so that memory stays bounded; None for the end of prompts only.
    """

    budget: Budget
    skip_layers: int = 0
    every: int | None = None

    def __post_init__(self) -> None:
        check_int(self, "skip_layers", self.skip_layers, 0)
        if self.every is not None:
            check_int(self, "every", self.every, 1)
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        if self.budget.tokens is not None and self.budget.tokens < self.minimum:
            raise PlanError(
                f"{type(self).__name__}: a budget of {self.budget.tokens} entries is too small, at least "
                f"{self.minimum} are needed ({self.why_minimum}); raise budget="
            )

    @property
    def window(self) -> int:
        return 0

    @property
    def when(self) -> When:
        return When(steps=self.every)

    @property
    def minimum(self) -> int:
        return 1

    @property
    def why_minimum(self) -> str:
        """The reason of `minimum`, for messages."""
        return "one entry"

    def scores(self, ctx: LayerContext) -> Tensor:
        """[B, H, N], or [B, Hq, N] to keep one set per query head. Higher stays; +inf protects an entry."""
        raise NotImplementedError

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        kept = tuple(min(count, stored) for count, stored in zip(counts, ctx.stored, strict=True))
        if ctx.layer_idx < self.skip_layers or kept == ctx.stored:
            return None
        scores = self.scores(ctx)
        if ctx.valid is not None:
            scores = scores.masked_fill(~_per_head(ctx.valid, scores.shape[1]), float("-inf"))
        return select_top(scores, kept)


def _per_head(valid: Tensor, heads: int) -> Tensor:
    return valid if valid.shape[1] == 1 else valid.repeat_interleave(heads // valid.shape[1], 1)


def check_int(owner: object, name: str, value: object, minimum: int, *, odd: bool = False) -> None:
    """Raise PlanError unless `value` is a whole number of at least `minimum` (and odd, if asked)."""
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= minimum and (not odd or value % 2 == 1)
    if not fine:
        wanted = f"{'an odd' if odd else 'a'} whole number of at least {minimum}"
        raise PlanError(f"{type(owner).__name__}: {name} must be {wanted}, got {value!r}")


def check_choice(owner: object, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise PlanError unless `value` is one of `choices`."""
    if value not in choices:
        raise PlanError(f"{type(owner).__name__}: {name} must be one of {', '.join(map(str, choices))}; got {value!r}")


def last_real(ctx: LayerContext, count: int) -> Tensor:
    """bool [B or 1, 1 or H, N]: True for the last `count` real entries of each row."""
    length = ctx.keys.shape[2]
    if ctx.valid is None:
        return (torch.arange(length, device=ctx.keys.device) >= length - count)[None, None]
    from_end = ctx.valid.flip(-1).cumsum(-1).flip(-1)
    return ctx.valid & (from_end <= count)


def first_real(ctx: LayerContext, count: int) -> Tensor:
    """bool [B or 1, 1 or H, N]: True for the first `count` real entries of each row."""
    if ctx.valid is None:
        return (torch.arange(ctx.keys.shape[2], device=ctx.keys.device) < count)[None, None]
    return ctx.valid & (ctx.valid.cumsum(-1) <= count)
