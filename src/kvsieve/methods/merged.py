"""Merging in place of dropping: an evictor's kept entries absorb the entries that it drops.

`base` chooses as without merging; then a rule moves keys and values of dropped entries into kept ones. `MeanMerge` is
the plain rule: each dropped entry goes to the kept one with the most similar key, and keys and values become means.

Stored keys are rotated by their positions, and rotated keys are merged, as in the public code of D2O and ZeroMerge: a
mean of keys of distant positions is shorter in the fast channels. `keys=False` leaves keys as they are, as CaM does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from kvsieve.core.merging import Parted, collect, nearest, part
from kvsieve.errors import PlanError, short
from kvsieve.lazy import Tensor
from kvsieve.methods.allocators import Cascade
from kvsieve.methods.base import check_int, positions, scored_by_name
from kvsieve.planning.budget import Budget
from kvsieve.planning.loading import PROVIDED
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import DelegatingEvictor, Evictor
from kvsieve.planning.specs import split_specs
from kvsieve.planning.suggestions import check_names, did_you_mean
from kvsieve.types import LayerContext, Selection

# Contexts of earlier layers in ``ctx.shared``.
_LAYERS = "merged"

Rule = TypeVar("Rule", bound="type[Merged]")
# The rules' classes by name.
RULES: dict[str, type[Merged]] = {}


def merge_rule(name: str) -> Callable[[Rule], Rule]:
    """Make the decorated class available as ``merge=name``."""

    def add(kind: Rule) -> Rule:
        RULES[name] = kind
        return kind

    return add


@dataclass(frozen=True)
class Merge:
    """Kept entries after a merge: keys [B, H, K, D], values [B, H, K, Dv], log weights [B, H, K]; None: unchanged."""

    keys: Tensor | None = None
    values: Tensor | None = None
    log_weight: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Merged(DelegatingEvictor, writes=True):
    """Base class of rules: subclasses implement `merge`.

    base: an evictor without own passes over a prompt. sinks: first tokens that take no part in merges, like protected
    ones; `base` keeps or drops them. Raises PlanError for a base that cannot be merged.
    """

    base: Evictor
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "sinks", self.sinks, 0)
        traits, name = self.base.traits, type(self.base).__name__
        reason = None
        if traits.is_view:
            reason = "drops nothing"
        elif traits.writes:
            reason = "writes entries itself"
        elif self.base.stored_heads(1, 2) > 1:
            reason = "stores entries for each query head; leave per_query_head out"
        elif traits.recuts and not (isinstance(self.base, Cascade) and self.base.defer_until_last_layer):
            reason = "drops entries of a layer bit by bit, as later layers are prefilled"
        if reason is not None:
            raise PlanError(f"{type(self).__name__}: {name} {reason}; use a base such as SnapKV(budget=0.2)")

    def merge(self, ctx: LayerContext, parted: Parted) -> Merge | None:
        """Return the kept entries after the merge, or None if nothing merges.

        Entries that are not `parted.open` keep their keys, values and weights.
        """
        raise NotImplementedError

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:
        if self.base.traits.recuts and ctx.step.phase == "prefill":
            # Its layers are cut after the last one; queries would take too much memory until then.
            seen = replace(ctx, query=ctx.query[:, :, :0].clone(), hidden=None, output=None)
            ctx.shared.setdefault(_LAYERS, {})[ctx.layer_idx] = seen
        chosen = self.base.select(ctx, counts)
        if isinstance(chosen, dict):
            layers = ctx.shared[_LAYERS]
            return {index: self._written(layers.pop(index), selection) for index, selection in chosen.items()}
        return None if chosen is None else self._written(ctx, chosen)

    def _written(self, ctx: LayerContext, selection: Selection) -> Selection:
        parted = part(ctx, selection, self._fixed(ctx))
        merge = None if parted is None else self.merge(ctx, parted)
        if parted is None or merge is None:
            return selection
        return replace(
            selection,
            indices=parted.kept,
            keys=None if merge.keys is None else merge.keys.to(ctx.keys.dtype),
            values=None if merge.values is None else merge.values.to(ctx.values.dtype),
            log_weight=None if merge.log_weight is None else merge.log_weight.float(),
        )

    def _fixed(self, ctx: LayerContext) -> Tensor:
        first = positions(ctx) < self.sinks
        return first if ctx.protected is None else first | ctx.protected


def averaged(
    parts: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], place: Tensor, count: Tensor | None = None
) -> Tensor:
    """Return weighted means of kept entries and the dropped entries at their places; unchanged where none came.

    Args:
        parts: of kept and dropped entries, [B, H, K, D] and [B, H, E, D].
        weights: [B, H, K] and [B, H, E]; 0 for entries that do not merge.
        place: int64 [B, H, E], among the kept entries.
        count: [B, H, E], the part of a dropped entry in the divisor. Default None: its weight.
    """
    kept, dropped = parts
    own, others = weights
    size = kept.shape[2]
    added = collect(others if count is None else count, place, size)
    total = kept * own[..., None] + collect(dropped * others[..., None], place, size)
    return (total / (own + added)[..., None]).where((added > 0)[..., None], kept)


@merge_rule("mean")
@dataclass(frozen=True, kw_only=True)
class MeanMerge(Merged, heads="own", query_aware=False):
    """Each kept entry becomes the mean of itself and the dropped entries with the keys most similar to its own.

    weights: True: an entry counts as the number of entries merged into it, in attention and in later means. keys:
    False: only values are averaged. threshold: least cosine of keys that merge, in [-1, 1]; other entries are dropped.
    """

    weights: bool = False
    keys: bool = True
    threshold: float = -1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cosine(self, self.threshold)

    def merge(self, ctx: LayerContext, parted: Parted) -> Merge:
        keys = parted.keys(ctx)
        alike, place = nearest(keys[1], keys[0], parted.open)
        own, others = parted.weights(ctx)
        others = others * (parted.merging & (alike >= self.threshold))
        values = averaged(parted.values(ctx), (own, others), place)
        log_weight = (own + collect(others, place, own.shape[2])).log() if self.weights else None
        return Merge(averaged(keys, (own, others), place) if self.keys else None, values, log_weight)


def check_cosine(owner: object, value: float) -> None:
    """Raise PlanError unless `threshold` is a cosine."""
    if not -1 <= value <= 1:
        raise PlanError(f"{type(owner).__name__}: threshold must be a cosine in [-1, 1], got {value!r}")


def merged_by_name(owner: str, evictor: Evictor | None, rule: str) -> Merged:
    """Return an evictor that merges the entries `evictor` drops; rule: such as "d2o" or "mean:weights=true".

    Raises PlanError.
    """
    specs = split_specs(rule) if isinstance(rule, str) else []
    if len(specs) != 1 or specs[0][0] not in RULES:
        known = list(RULES)
        raise PlanError(
            f"{owner}: merge= takes a rule such as 'mean' or 'mean:weights=true', got {short(rule)}"
            f"{did_you_mean(rule if isinstance(rule, str) else '', known)}"
        )
    if evictor is None:
        raise PlanError(f"{owner} evicts nothing to merge; leave merge= out, or use a method such as snapkv")
    ((name, settings),) = specs
    fields = RULES[name].__dataclass_fields__
    check_names(f"merge={name}", {field: None for field in fields if field != "base"}, settings)
    return RULES[name](base=evictor, **settings)


PROVIDED["merge"] = merged_by_name


@register_method("merge", title="Merging", paper="none", phase="end of prompt")
def merge(
    budget: Budget | str | int | float = "20%",
    base: str = "snapkv",
    rule: str = "mean",
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Merge the entries that another method, `base`, drops into those that it keeps."""
    return Plan(evict=merged_by_name("merge", scored_by_name("merge", base, budget, skip_layers, every), rule))
