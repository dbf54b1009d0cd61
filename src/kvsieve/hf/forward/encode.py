"""Time of encoding a layer's entries: after its attention, or after all layers have acted."""

from __future__ import annotations

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import ProbingEvictor
from kvsieve.types import Step


def _chooses_late(plan: Plan) -> bool:
    """True if slots of a layer are chosen after its attention: until then they must not change."""
    return plan.evict is not None and (plan.evict.traits.recuts or isinstance(plan.evict, ProbingEvictor))


def decode_before(plan: Plan, layer: SieveLayer) -> None:
    """Decode entries that an evictor will reduce several times in this pass; they are encoded again after it.

    They are few, because the evictor has reduced them before.
    """
    if layer.store.is_encoded and plan.rest is None and _chooses_late(plan):
        layer.store = layer.store.padded()


def encode_after(plan: Plan, cache: SieveCache, index: int, layer: SieveLayer, step: Step, *, reduced: bool) -> None:
    """Encode entries that are no longer among the newest.

    Args:
        plan: with a codec.
        cache: of the layer.
        index: of the layer.
        layer: after its attention.
        step: the pass. Evictors see exact entries until they act on a prompt.
        reduced: the plan acts in it.
    """
    assert plan.codec is not None
    if not reduced and step.phase == "prefill" and plan.evict is not None:
        return
    ends = step.ends_prompt
    if not reduced or not _chooses_late(plan):
        layer.encode(plan.codec, ends_prompt=ends)
        return
    layers = cache.sieve_layers
    if index == max(layers):
        for other in layers.values():
            other.encode(plan.codec, ends_prompt=ends)
