"""Budgets in bytes: entries per layer and KV head of a cache of that size."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kvsieve.cache.contract import window_room
from kvsieve.cache.lanes import LANES
from kvsieve.errors import PlanError, UnsupportedModelError
from kvsieve.hf.model.shapes import LayerShape, layer_shapes, meta_model
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.quantities import format_bytes
from kvsieve.planning.roles import Codec, byte_budgets, with_entries
from kvsieve.planning.unset import SettledParameters

_INDEX_BYTES = _WIDE_BYTES = _WEIGHT_BYTES = 4
# Layers of the models seen so far, by their configurations.
_SHAPES: dict[str, tuple[LayerShape, ...]] = {}


def fit_model(plan: Plan, model: Any) -> Plan:
    """Return a plan with budgets in bytes converted to entries on a model of transformers; see `fit`."""
    try:
        shapes = shapes_of(model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{plan.name!r}: a budget in bytes needs the sizes of the model's cache, and {error}; give the budget as a "
            "share or as a number of entries"
        ) from error
    return fit(plan, shapes, model.dtype.itemsize)


def shapes_of(model: Any) -> tuple[LayerShape, ...]:
    """Shapes of the layers of a model of transformers. Raises UnsupportedModelError."""
    key = f"{type(model.config).__name__} {model.config.to_json_string(use_diff=False)}"
    if key not in _SHAPES:
        _SHAPES[key] = layer_shapes(meta_model(model.config))
    return _SHAPES[key]


def fit(plan: Plan, shapes: Sequence[LayerShape], element_bytes: int) -> Plan:
    """Return a plan with budgets in bytes converted to entries per layer and KV head.

    A budget is for the cache of one row once its prompt is complete: keys, values and token indices of all layers and
    heads, including sliding windows and recurrent states.

    Args:
        plan: any.
        shapes: of the model's layers.
        element_bytes: of one key or value element.

    Raises:
        PlanError: the plan's memory does not follow from its budget, or the budget is too small.
    """
    if not plan.budgets_in_bytes:
        return plan
    evict = plan.evict
    size = next(budget for role in plan.roles for budget in byte_budgets(vars(plan)[role]))
    reason = None
    if evict is not None and evict.traits.is_view:
        reason = "it stores everything, and its budget is what an answer reads"
    elif plan.rest is not None:
        reason = "what it would drop is kept in few bits, so that it takes more with every token"
    elif evict is not None and evict.skip_layers not in (0, ()):
        reason = f"layers that keep everything (skip_layers={evict.skip_layers}) take more with every token"
    if reason is not None:
        raise PlanError(
            f"{plan.name!r} cannot take a budget in bytes, got {size}: {reason}; give a share like '20%' or a number "
            "of entries like 2048"
        )

    def taken(entries: int) -> int:
        return sum(layer_bytes(plan, shape, element_bytes, entries, most=True) for shape in shapes)

    def entries(budget: Budget) -> int:
        assert budget.bytes is not None
        fixed = taken(0)
        found = bisect.bisect_right(range(1, budget.bytes), budget.bytes, key=taken)
        if found < 1:
            beside = f", beside {format_bytes(fixed)} whatever the budget" if fixed else ""
            raise PlanError(
                f"{plan.name!r}: a budget of {budget} is too small for this model: one entry in every layer and KV "
                f"head takes {taken(1) - fixed:,} bytes{beside}; raise budget="
            )
        return found

    count = entries(size)
    entry_size = f"{(taken(count) - taken(0)) // count:,} bytes an entry"
    try:
        roles: dict[str, Any] = {
            role: with_entries(value, entries) for role in plan.roles if (value := vars(plan)[role]) is not None
        }
    except PlanError as error:
        raise PlanError(f"{plan.name!r} with {size} on this model ({entry_size}): {error}") from error
    least = roles["evict"].minimum if evict is not None else 0
    if count < least:
        raise PlanError(
            f"{plan.name!r}: a budget of {size} is {count} entries per layer and KV head on this model, and it keeps "
            f"at least {least}; raise budget= to {format_bytes(taken(least))}"
        )
    unset = plan.unset
    if unset is not None and "budget" in unset.given:
        unset = dataclasses.replace(unset, given={**unset.given, "budget": count})
    source = f"{size} of this model's cache, {entry_size} of all layers and heads"
    filled = SettledParameters(((source, {"budget": count}),))
    return dataclasses.replace(plan, **roles, unset=unset, filled=filled, name=plan.name)


def layer_bytes(
    plan: Plan, shape: LayerShape, element_bytes: int, entries: float, *, most: bool = False, aside: float = 0
) -> int:
    """Return the bytes of one layer of a row's cache once a prompt is complete: keys, values, states, token indices.

    Spare room and methods' state are not included.

    Args:
        plan: acts on the layer.
        shape: of the layer.
        element_bytes: of one key or value element.
        entries: kept by each KV head if the layer's KV grows.
        aside: further entries, kept by the plan's `rest`.
        most: upper bound, with some entries not encoded yet.
    """
    evict = plan.evict
    heads = shape.heads
    kind = shape.kind
    fixed = shape.state_elements * element_bytes + shape.wide_state_elements * _WIDE_BYTES
    entry = shape.entry_elements * element_bytes + heads * _INDEX_BYTES
    if not kind.grows:
        return fixed + (kind.span - 1 + window_room(kind.span) if kind.span else 0) * entry
    if plan.codec is not None:
        codec_bytes = encoded_bytes(plan.codec, shape, entries, element_bytes, most=most, aside=aside)
        return round(codec_bytes + (entries + aside) * heads * _INDEX_BYTES + aside_bytes(plan, shape, aside)) + fixed
    if evict is not None and evict.traits.writes:
        entry += heads * _WEIGHT_BYTES
    stored = heads if evict is None else evict.stored_heads(heads, shape.query_heads)
    entry = entry * stored // heads
    if evict is not None and evict.traits.ragged:
        # Every head has a bias for all slots; slots are rounded up to lanes.
        entry += stored * stored * element_bytes
        fixed += (LANES - 1) * entry // stored
    return round(entry * entries + aside * heads * _INDEX_BYTES + aside_bytes(plan, shape, aside)) + fixed


def encoded_bytes(
    codec: Codec, shape: LayerShape, entries: float, element_bytes: int, *, most: bool = False, aside: float = 0
) -> float:
    """Return the bytes of one layer's keys and values in a row, with the newest exact.

    most, aside: as in `layer_bytes`; the bytes of the latter are not counted.
    """
    exact: float = codec.sinks + codec.newest(int(entries + aside))
    encoded = entries - exact
    some = codec.block / 2
    if most:
        # Half a block may stay exact, and that of a KV head be filled the least.
        exact = exact + min(encoded, some)
        encoded = encoded - some
        return exact * shape.entry_elements * element_bytes + _blocks_bytes(codec, shape, encoded, codec.block - 1)
    if encoded < some:
        return entries * shape.entry_elements * element_bytes
    return exact * shape.entry_elements * element_bytes + _blocks_bytes(codec, shape, encoded)


def aside_bytes(plan: Plan, shape: LayerShape, entries: float) -> float:
    """Return the bytes of one layer's evicted keys and values in a row, kept by the plan's `rest`."""
    return 0 if plan.rest is None else _blocks_bytes(plan.rest, shape, entries)


def _blocks_bytes(codec: Codec, shape: LayerShape, entries: float, empty: int = 0) -> float:
    """Return the bytes of entries in as few blocks as possible, and of `empty` further places, of each KV head."""
    if entries <= 0:
        return 0
    blocks = math.ceil((entries + empty) / codec.block)
    places = entries + empty if empty else blocks * math.ceil(entries / blocks)
    tokens = places / blocks
    forms = zip(shape.dims, (codec.keys(shape.dims[0]), codec.values(shape.dims[1])), strict=True)
    # Means and divisors of channels are per KV head.
    return shape.heads * sum(
        dim * (places * form.bits_per_number(dim, tokens) / 8 + _WIDE_BYTES * (form.centered + form.balanced))
        for dim, form in forms
    )
