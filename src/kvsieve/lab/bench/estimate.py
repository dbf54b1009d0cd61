"""Predicted costs of a plan on a model, from the model's config alone. docs/choosing.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.errors import InputError, PlanError
from kvsieve.hf.shape import growing_layers
from kvsieve.lab.bench.geometry import Geometry, Layer
from kvsieve.lab.bench.weight_sizes import WeightSizes, weight_sizes
from kvsieve.methods.base import ScoredEvictor, skipped
from kvsieve.methods.fastkv import TSP
from kvsieve.planning.plans import Plan


@dataclass(frozen=True)
class Estimate:
    """Predicted costs of one prompt per row; FLOPs and bytes are those of the whole batch.

    Attributes:
        deep_tokens: tokens in the deepest layer.
        kv_entries: per layer, per row and stored head, right after the prompt; 0 for a layer that stores none.
        kv_bytes: encoded keys and values, and recurrent states.
        state_bytes: the recurrent states alone, which do not grow.
        weight_bytes: of all weights.
        matmul_flops: of linear layers, in prefill.
        attention_flops: of attention and recurrences, in prefill.
        decode_bytes: read to generate one token per row.
    """

    deep_tokens: int
    kv_entries: tuple[int, ...]
    kv_bytes: int
    state_bytes: int
    weight_bytes: int
    matmul_flops: float
    attention_flops: float
    decode_bytes: float

    @property
    def prefill_flops(self) -> float:
        return self.matmul_flops + self.attention_flops

    def prefill_seconds(self, matmul_tflops: float, attention_tflops: float) -> float:
        """Return the seconds of prefill at these achieved rates (10^12 FLOP/s)."""
        return (self.matmul_flops / matmul_tflops + self.attention_flops / attention_tflops) / 1e12

    def decode_seconds(self, bandwidth: float) -> float:
        """Return the seconds per generated token at this achieved bandwidth (10^9 bytes/s)."""
        return self.decode_bytes / bandwidth / 1e9


def estimate(
    geometry: Geometry,
    plan: Plan,
    tokens: int,
    *,
    batch: int = 1,
    element_bytes: int = 2,
    weights: WeightSizes | None = None,
) -> Estimate:
    """Predict the costs of `plan` on a prompt of `tokens` per row.

    element_bytes: bytes of one key or value element. weights: default: of `element_bytes` a number.

    Raises InputError for a prompt or batch below 1, PlanError for a role without a known cost, and
    UnsupportedModelError if kvsieve cannot run the plan on the model.
    """
    if tokens < 1 or batch < 1:
        raise InputError(f"an estimate needs at least 1 token and 1 row, got {tokens} tokens in {batch} rows")
    check_priced(plan)
    if plan.roles and geometry.model is not None:
        from kvsieve.hf.model.support import check_model

        check_model(geometry.model, plan)
    else:
        for role in plan.roles:
            vars(plan)[role].check(len(geometry.layers))
    sizes = weight_sizes(geometry, element_bytes) if weights is None else weights
    layers = geometry.layers
    seen = _tokens_per_layer(plan, geometry, tokens)
    kept = [_entries(plan, index, layers, seen[index], tokens) for index in range(len(layers))]
    row_bytes = [
        _row_bytes(plan, geometry, index, *entry, element_bytes, seen[index]) for index, entry in enumerate(kept)
    ]
    if plan.rest is not None:
        kept = [(seen[index], sets) for index, (_, sets) in enumerate(kept)]
    stored = sum(row_bytes[index] for index, layer in enumerate(layers) if layer.reads == index)
    read = sum(row_bytes[layer.reads] for layer in layers)
    states = sum(layer.state_bytes(element_bytes) for layer in layers)
    matmul = sum(2 * layer.linear_parameters * n for layer, n in zip(layers, seen, strict=True))
    matmul += 2 * geometry.outside_parameters * tokens + 2 * geometry.head_parameters
    attention = sum(
        share * layer.pair_flops * _pairs(layer, n, seen[layer.reads]) + layer.state_flops * n
        for layer, n, share in zip(layers, seen, _densities(plan, layers, seen), strict=True)
    )
    return Estimate(
        deep_tokens=seen[-1],
        kv_entries=tuple(entries if layers[i].reads == i else 0 for i, (entries, _) in enumerate(kept)),
        kv_bytes=(stored + states) * batch,
        state_bytes=states * batch,
        weight_bytes=sizes.total,
        matmul_flops=matmul * batch,
        attention_flops=attention * batch,
        decode_bytes=geometry.weights_read(batch) * sizes.number + (read + states) * batch,
    )


def largest_batch(one: Estimate, memory_bytes: float) -> int:
    """Return the rows with entries that fit beside the weights, without activations; `one`: costs of a single row."""
    return max(0, int((memory_bytes - one.weight_bytes) // one.kv_bytes))


def check_priced(plan: Plan) -> None:
    """Raise PlanError for a plan with a role that the formulas do not cover."""
    unknown = [role for role in plan.roles if role == "read"]
    if unknown:
        raise PlanError(
            f"estimate cannot price {plan.name!r}: it knows the roles propagate, evict, prefill, codec and rest, not "
            f"{', '.join(unknown)}; measure it with `kvsieve run` instead"
        )
    if plan.prefill is not None and plan.prefill.density(1) is None:
        raise PlanError(
            f"estimate cannot price {plan.name!r}: which blocks {type(plan.prefill).__name__} computes depends on the "
            "prompt; measure it with `kvsieve run` instead, whose statistics tell the density"
        )
    for part, known in ((plan.propagate, TSP), (plan.evict, ScoredEvictor)):
        if part is not None and (not isinstance(part, known) or type(part).select is not known.select):
            raise PlanError(
                f"estimate cannot price {plan.name!r}: {type(part).__name__} selects in its own way and only "
                f"{known.__name__}'s is known; measure it with `kvsieve run` instead"
            )


def _tokens_per_layer(plan: Plan, geometry: Geometry, tokens: int) -> list[int]:
    layers = geometry.layers
    if not isinstance(plan.propagate, TSP):
        return [1 if layer.last_token_only else tokens for layer in layers]
    source = plan.propagate.first_layer(len(layers), growing_layers(geometry.kinds))
    deep = min(tokens, plan.propagate.rate.entries(tokens, plan.propagate.window))
    return [tokens if index <= source else deep for index in range(len(layers))]


def _densities(plan: Plan, layers: tuple[Layer, ...], seen: list[int]) -> list[float]:
    """Return the computed share of each layer's pairs of a query and a key."""
    if plan.prefill is None:
        return [1.0] * len(layers)
    sparse = [layer.kind.grows and plan.prefill.acts_in(index, len(layers)) for index, layer in enumerate(layers)]
    return [(plan.prefill.density(n) or 1.0) if acts else 1.0 for acts, n in zip(sparse, seen, strict=True)]


def _entries(plan: Plan, index: int, layers: tuple[Layer, ...], seen: int, tokens: int) -> tuple[int, int]:
    """Return the entries of a layer after the prompt, and the number of sets per KV head."""
    layer = layers[index]
    kind = layer.kind
    if not kind.grows:
        # One entry less than the window: the next token brings the last one.
        stored = {"window": min(seen, (kind.span or 1) - 1), "chunk": min(seen, tokens % (kind.span or 1))}
        return stored.get(kind.entries, 0), 1
    if not isinstance(plan.evict, ScoredEvictor) or skipped(plan.evict.skip_layers, index, len(layers)):
        return seen, 1
    entries = min(seen, plan.evict.entries(tokens))
    return entries, plan.evict.stored_heads(1, layer.groups) if entries < seen else 1


def _row_bytes(
    plan: Plan, geometry: Geometry, index: int, entries: int, sets: int, element_bytes: int, seen: int
) -> int:
    """Return the bytes of keys and values of one row in a layer after `seen` tokens."""
    layer = geometry.layers[index]
    shape = geometry.shapes[index]
    if not layer.kind.grows:
        return entries * layer.kv_elements * sets * element_bytes
    set_bytes: float = entries * layer.kv_elements * element_bytes
    if plan.codec is None and plan.rest is None:
        return round(sets * set_bytes)
    from kvsieve.hf.model.memory import aside_bytes, encoded_bytes

    aside = 0 if plan.rest is None else seen - entries
    if plan.codec is not None:
        set_bytes = encoded_bytes(plan.codec, shape, entries, element_bytes, aside=aside)
    return round(sets * set_bytes + aside_bytes(plan, shape, aside))


def _pairs(layer: Layer, tokens: int, keys: int) -> float:
    """Return the pairs of a query and a key under a causal mask; the same token counts as half a pair."""
    span = layer.sees.span
    if tokens < keys:
        return min(keys, span or keys)
    if layer.sees.entries == "chunk" and span is not None:
        return (tokens // span * span**2 + (tokens % span) ** 2) / 2
    reach = tokens if span is None else min(tokens, span)
    return reach * (tokens - reach / 2)
