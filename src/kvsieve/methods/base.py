"""Base class of most evictors, and helpers of methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvsieve.core.scoring import WIDEST
from kvsieve.core.selection import select_top, top_mask
from kvsieve.errors import PlanError, UnsupportedModelError, short
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.stays import Stays
from kvsieve.planning.answers import parse_answer, refuse_answer
from kvsieve.planning.budget import Budget
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.parameters import MOST
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import DelegatingEvictor, Evictor, Layers, Traits
from kvsieve.types import LayerContext, ModelFacts, Selection, When


@dataclass(frozen=True, kw_only=True)
class ScoredEvictor(Stays, Evictor, takes_quotas=True):
    """An evictor that ranks entries: subclasses implement `scores`, this class keeps the best within the budget.

    budget: entries kept per layer and KV head, including protected ones; a Budget or its text ("20%", 2048).
    skip_layers: layers that keep everything: how many at the start, or which, e.g. (0, 1, -1), as text "0/1/-1". every:
    evict again each time this many tokens have been generated, to the prompt's number of entries, so that memory is
    bounded; None for the end of prompts only.

    answer: while decoding, evict only entries of this turn's answer, down to a number or a share of the answer's tokens
    so far, or "remaining": the part of the budget that the prompt left. None: prompt and answer share the budget.
    grows: while decoding, a share of the budget is one of all tokens, generated ones included.
    """

    budget: Budget
    skip_layers: Layers = 0
    every: int | None = None
    answer: Budget | str | int | float | None = None
    grows: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip_layers", parse_layers(self, self.skip_layers))
        if self.every is not None:
            check_int(self, "every", self.every, 1)
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        self.budget.refuse_fewer(self.least_budget, type(self).__name__, self.why_minimum)
        if self.answer is not None or self.grows:
            answer = parse_answer(self, self.answer, self.every, why=self.why_minimum)
            object.__setattr__(self, "answer", answer)

    @property
    def traits(self) -> Traits:
        # The numbers of entries then depend on the answer's length.
        changed = self.keeps_prompt or self.grows
        return replace(self.TRAITS, fixed_counts=False) if changed else self.TRAITS

    @property
    def when(self) -> When:
        return When(steps=self.every, observes=type(self).observe is not Evictor.observe)

    @property
    def keeps_prompt(self) -> bool:
        return self.answer is not None

    def answer_entries(self, generated: int, prompt: int, budget: int) -> int:
        if isinstance(self.answer, Budget):
            return self.answer.entries(generated, self.minimum)
        return super().answer_entries(generated, prompt, budget)

    @property
    def least_budget(self) -> int:
        """Smallest budget in tokens: `minimum`, unless the budget differs from the entries kept."""
        return self.minimum

    def scores(self, ctx: LayerContext) -> Tensor:
        """Return [B, H, N], or [B, Hq, N] for one set per query head; higher scores stay, +inf protects an entry."""
        raise NotImplementedError

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        """Return the ranks for `select`: `scores`, unless they depend on the numbers of entries kept, ``kept[b]``."""
        return self.scores(ctx)

    def forget(self, ctx: LayerContext, selection: Selection) -> None:
        """Drop records of other entries than those of `selection` from ``ctx.state``; called by `select`."""

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        return keep_best(self, ctx, counts)


@dataclass(frozen=True, kw_only=True)
class Wrapper(DelegatingEvictor):
    """An evictor that changes the effect of the scores of another one, `base`: subclasses implement `ranks`.

    base: an evictor that ranks entries by `scores` alone, such as SnapKV; all other traits are its own. Raises
    PlanError for another kind of evictor.
    """

    base: ScoredEvictor

    def __post_init__(self) -> None:
        kind = type(self.base)
        fine = isinstance(self.base, ScoredEvictor) and kind.scores is not ScoredEvictor.scores
        if not fine or kind.select is not ScoredEvictor.select or kind.ranks is not ScoredEvictor.ranks:
            raise PlanError(
                f"{type(self).__name__}: base must be an evictor that ranks entries by scores alone, such as "
                f"SnapKV(budget=0.2) or KNorm(budget=0.2), got {self.base!r}"
            )
        refuse_answer(self, self.base)

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        """Return [B, H, N], or [B, Hq, N], the ranks for `select`, with ``kept[b]`` entries kept in row b."""
        raise NotImplementedError

    def forget(self, ctx: LayerContext, selection: Selection) -> None:
        self.base.forget(ctx, selection)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        return keep_best(self, ctx, counts)


def keep_best(evictor: ScoredEvictor | Wrapper, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
    """Implement `select` of an evictor that ranks."""
    kept = tuple(min(count, stored) for count, stored in zip(counts, ctx.stored, strict=True))
    if skips(evictor.skip_layers, ctx) or kept == ctx.stored:
        return None
    selection = select_top(*apply_protection(ctx, hide_padding(ctx, evictor.ranks(ctx, kept)), kept))
    evictor.forget(ctx, selection)
    return selection


def hide_padding(ctx: LayerContext, scores: Tensor) -> Tensor:
    return scores if ctx.valid is None else scores.masked_fill(~per_head(ctx.valid, scores.shape[1]), float("-inf"))


def scored_by_name(
    owner: str, name: str, budget: Any, skip_layers: int | tuple[int, ...] | str, every: int | None
) -> ScoredEvictor:
    """Return the named method's evictor with defaults, for a wrapper's `base`. Raises PlanError for another kind."""
    plan = plan_of_base(owner, name, budget=budget)
    if plan.roles != ("evict",) or not isinstance(plan.evict, ScoredEvictor):
        raise PlanError(f"{owner}: base must name a method that ranks entries by scores, e.g. snapkv; got {name!r}")
    return replace(plan.evict, skip_layers=parse_layers(plan.evict, skip_layers), every=every)


def plan_of_base(owner: str, name: str, **parameters: Any) -> Plan:
    """Return the plan of a method that `owner` takes as `base`. Raises PlanError, which names it."""
    try:
        return plan_without_floor(name, **parameters)
    except PlanError as error:
        raise PlanError(f"{owner}: base={short(name)}: {error}") from error


def apply_protection(
    ctx: LayerContext, scores: Tensor, kept: tuple[int, ...], *, insist: bool = False
) -> tuple[Tensor, tuple[int, ...]]:
    """Adjust scores [B, X, M] of the last M entries (padding -inf) and counts per row for protected entries.

    Protected entries and the best of each quota get +inf, and counts are raised if more must stay. The method's own
    +inf ranks right below, or equally with `insist`. X is the number of heads, a multiple of it, or 1 for scores shared
    by all heads.
    """
    if ctx.protected is None and ctx.quotas is None:
        return scores, kept
    heads, size = scores.shape[1:]
    most = torch.finfo(scores.dtype).max
    if not insist:
        scores = scores.clamp(max=most)
    if ctx.protected is not None:
        scores = scores.masked_fill(per_head(ctx.protected[:, :heads, -size:], heads), float("inf"))
    if ctx.quotas is not None:
        segment = per_head(ctx.quotas.segment[:, :heads, -size:], heads)
        for part, count in enumerate(ctx.quotas.counts.T, 1):
            inside = segment == part
            own = scores.clamp(min=-most).masked_fill(~inside, float("-inf"))
            scores = scores.masked_fill(top_mask(own, count) & inside, float("inf"))
    must = scores.isposinf().sum(-1).amax(-1).tolist()
    return scores, tuple(map(max, kept, must))


def per_head(part: Tensor, heads: int) -> Tensor:
    return part if part.shape[1] == 1 else part.repeat_interleave(heads // part.shape[1], 1)


def parse_layers(owner: object, value: Any) -> int | tuple[int, ...]:
    """Parse `skip_layers`: how many first layers, or which. Raises PlanError."""
    try:
        if isinstance(value, str):
            value = [int(layer) for layer in value.split("/") if layer.strip()]
        if isinstance(value, (list, tuple)) and all(type(layer) is int for layer in value):
            return tuple(value)
    except ValueError:
        pass
    else:
        if type(value) is int and value >= 0:
            return value
    raise PlanError(
        f"{type(owner).__name__}: skip_layers must be a number of first layers, at least 0, or layers such as "
        f"(0, 1, -1), as text '0/1/-1'; got {short(value)}"
    )


def skips(layers: int | tuple[int, ...], ctx: LayerContext) -> bool:
    return skipped(layers, ctx.layer_idx, ctx.num_layers)


def skipped(layers: int | tuple[int, ...], index: int, num_layers: int) -> bool:
    return index < layers if isinstance(layers, int) else index in layers or index - num_layers in layers


def check_int(owner: object, name: str, value: object, minimum: int, *, most: int = MOST, odd: bool = False) -> None:
    """Raise PlanError unless `value` is a whole number from `minimum` to `most` and, if `odd`, odd."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not minimum <= value <= most or (odd and value % 2 == 0):  # type: ignore[operator]
        limit = f"from {minimum} to {most}" if most < MOST else f"of at least {minimum}"
        wanted = f"{'an odd' if odd else 'a'} whole number {limit}"
        raise PlanError(f"{type(owner).__name__}: {name} must be {wanted}, got {short(value)}")


def check_share(owner: object, name: str, value: float) -> None:
    """Raise PlanError unless `value` is a share, 0 and 1 included."""
    if not 0 <= value <= 1:
        raise PlanError(f"{type(owner).__name__}: {name} must be a share in [0, 1], got {value!r}")


def check_kernel(owner: object, value: object) -> None:
    """Raise PlanError unless `value` is an odd width of a pooling, or "auto"."""
    if value != "auto":
        check_int(owner, "kernel", value, 1, most=WIDEST, odd=True)


def refuse_unused(owner: object, setting: str, *names: str) -> None:
    """Raise PlanError for parameters other than their defaults. setting: under which they have no effect."""
    fields = type(owner).__dataclass_fields__  # type: ignore[attr-defined]
    for name in names:
        if vars(owner)[name] != fields[name].default:
            given = short(vars(owner)[name])
            raise PlanError(f"{type(owner).__name__}: {name}={given} has no effect with {setting}; leave it out")


def last_real(ctx: LayerContext, count: int | tuple[int, ...]) -> Tensor:
    """Return bool [B or 1, 1 or H, N], True for the last `count` real entries of each row; a tuple has one per row."""
    length = ctx.keys.shape[2]
    last: int | Tensor = count if isinstance(count, int) else _per_row(ctx, count)
    if ctx.valid is None:
        return torch.arange(length, device=ctx.keys.device).view(1, 1, -1) >= length - last
    from_end = ctx.valid.flip(-1).cumsum(-1).flip(-1)
    return ctx.valid & (from_end <= last)


def _per_row(ctx: LayerContext, count: tuple[int, ...]) -> Tensor:
    return torch.tensor(count).view(-1, 1, 1).to(ctx.keys.device, non_blocking=True)


def first_real(ctx: LayerContext, count: int) -> Tensor:
    """Return bool [B or 1, 1 or H, N], True for the first `count` real entries of each row."""
    if ctx.valid is None:
        return (torch.arange(ctx.keys.shape[2], device=ctx.keys.device) < count)[None, None]
    return ctx.valid & (ctx.valid.cumsum(-1) <= count)


def positions(ctx: LayerContext) -> Tensor:
    """Return the position of each stored entry in its row without padding, int64 [B, H, N], 0 for filler."""
    if ctx.step.mask is not None:
        place = (ctx.step.mask.cumsum(-1) - 1).clamp_min(0).to(ctx.index.device)
        index = ctx.index.long().clamp_min(0)
        return place[:, None].expand(-1, index.shape[1], -1).gather(2, index).masked_fill(ctx.index < 0, 0)
    fed = ctx.step.start + ctx.step.num_new
    padding = _per_row(ctx, tuple(fed - length for length in ctx.step.lengths))
    return (ctx.index.long() - padding).clamp_min(0)


def unrotated_keys(ctx: LayerContext) -> Tensor:
    """Return the stored keys before rotation, [B, H, N, D], in float32 (float64 for float64 keys).

    For an evictor with "rotary" in `needs`. Keys of filler are as at position 0.
    """
    facts = model_facts(ctx)
    place = positions(ctx)
    # Heads may store different tokens.
    heads = range(ctx.keys.shape[1])
    keys = [facts.rotate(ctx.layer_idx, ctx.keys[:, at : at + 1], place[:, at], inverse=True) for at in heads]
    return torch.cat(keys, 1)


def by_token(ctx: LayerContext, part: Tensor, absent: float | bool = 0) -> Tensor:
    """Move values [B, X, N] of stored entries to their tokens' columns, [B, X, T]; tokens not stored get `absent`.

    Heads may store different tokens. X is a multiple of the KV heads.
    """
    columns = ctx.step.start + ctx.step.num_new
    index = ctx.index.long().repeat_interleave(part.shape[1] // ctx.index.shape[1], 1)
    found = part.new_full((*part.shape[:2], columns + 1), absent)
    # Filler goes to a column of its own, which is dropped.
    return found.scatter_(2, index.masked_fill(index < 0, columns), part)[..., :columns]


def at_entries(ctx: LayerContext, columns: Tensor, heads: int) -> Tensor:
    """Return the values [B, X or 1, T] of tokens at the entries that store them, [B, X, N] for X = `heads`."""
    index = ctx.index.long().clamp_min(0).repeat_interleave(heads // ctx.index.shape[1], 1)
    return columns.expand(-1, heads, -1).gather(2, index)


def same_in_layers(ctx: LayerContext, skip: int | tuple[int, ...], share: int, make: Callable[[], Tensor]) -> Tensor:
    """Return ranks [B, 1, N] that the first of every `share` acting layers makes and the others reuse, by token.

    skip: layers that keep everything, which do not count.
    """
    if share == 1:
        return make()
    acting = [index for index in ctx.layers or range(ctx.num_layers) if not skipped(skip, index, ctx.num_layers)]
    group = acting.index(ctx.layer_idx) // share
    known, columns = ctx.shared.get("same_in_layers", (None, None))
    if known == group:
        return at_entries(ctx, columns.to(ctx.index.device), ctx.index.shape[1])[:, :1]
    ranks = make()
    lowest = torch.finfo(ranks.dtype).min
    columns = by_token(ctx, ranks.expand(-1, ctx.index.shape[1], -1), lowest)[:, :1]
    ctx.shared["same_in_layers"] = group, columns
    return ranks


def model_facts(ctx: LayerContext) -> ModelFacts:
    if ctx.model is None:
        raise UnsupportedModelError("the evictor needs facts about the model, which kvsieve.attach provides")
    return ctx.model
