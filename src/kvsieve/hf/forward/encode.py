"""When a layer's entries are encoded: after its attention, or once all layers have acted."""

from __future__ import annotations

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import ProbingEvictor
from kvsieve.types import Step


def _chooses_late(plan: Plan) -> bool:
    """True where slots of a layer are chosen after it has attended: until then they must stay what they were."""
    return plan.evict is not None and (plan.evict.traits.recuts or isinstance(plan.evict, ProbingEvictor))


def decode_before(plan: Plan, layer: SieveLayer) -> None:
    """Decode entries that an evictor will reduce more than once in this pass, after which they are encoded again.

    They are few, since it has reduced them before.
    """
    if layer.store.is_encoded and plan.rest is None and _chooses_late(plan):
        layer.store = layer.store.padded()


def encode_after(plan: Plan, cache: SieveCache, index: int, step: Step, *, reduced: bool) -> None:
    """Encode what has left the newest entries.

    Args:
        plan: with a codec.
        cache: of the layer.
        index: of the layer, which has attended.
        step: the pass. Until they act on a prompt, evictors see exact entries.
        reduced: the plan acts in it.
    """
    assert plan.codec is not None
    if not reduced and step.phase == "prefill" and plan.evict is not None:
        return
    layers = cache.sieve_layers
    ends = step.ends_prompt
    if not reduced or not _chooses_late(plan):
        layers[index].encode(plan.codec, ends_prompt=ends)
    elif index == max(layers):
        for layer in layers.values():
            layer.encode(plan.codec, ends_prompt=ends)
