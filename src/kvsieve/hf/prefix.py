"""One reading of a document for many questions.

Prompts that begin alike need their beginning read once: each goes on from it as from the leading chunks of a chunked
prompt. Propagators do, too: up to the first layer that may drop tokens they read what full KV reads, and what waits
there in a chunked prompt is noted as it is read.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.hf.attach import attached
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.records import DeferredChunk
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.prompt.options import Progress
from kvsieve.hf.runtime import AttachedModel
from kvsieve.plans import Plan
from kvsieve.roles import Evictor, Propagator
from kvsieve.roles.codec import ASKED
from kvsieve.types import LayerContext


@dataclass
class LayerRecorder:
    """Notes what each layer is shown, and lets evictors observe that do."""

    window: int
    evictors: tuple[Evictor, ...]
    seen: dict[int, LayerContext] = field(default_factory=dict)
    learned: dict[tuple[int, Evictor], dict[str, Any]] = field(default_factory=dict)

    def on_layer(self, ctx: LayerContext) -> None:
        """See PassRequest.on_layer."""
        for each in self.evictors:
            if each.when.observes:
                state = self.learned.setdefault((ctx.layer_idx, each), {})
                each.observe(dataclasses.replace(ctx, state=state))
        if ctx.step.ends_prompt:
            # The window's queries are all an evictor may look at, and those that keys are encoded for; the rest of
            # them would be as large as the cache.
            query = ctx.query[:, :, -max(self.window, ASKED) :].clone()
            self.seen[ctx.layer_idx] = dataclasses.replace(ctx, query=query, hidden=None, output=None)


@dataclass
class SharedPrefix:
    """The beginning of prompts, read once in full. Only one prompt that goes on from it may be in use at a time.

    Attributes:
        cache: of them, in the middle of a prompt.
        waiting: by layer, the chunks that wait there for a propagator.
        learned: what evictors that observe have learned, per layer and evictor.
    """

    cache: SieveCache
    waiting: dict[int, list[DeferredChunk]]
    learned: dict[tuple[int, Evictor], dict[str, Any]]

    def begins(self, model: AttachedModel, propagate: Propagator | None, evictor: Evictor | None = None) -> SieveCache:
        """Make a cache that goes on from here, on the same buffers; with what `evictor` has learned."""
        cache = self.cache.fork(share=True)
        source = source_layer(model, propagate)
        if source is not None:
            fresh = model.new_cache()
            fresh.advance(self.cache.num_seen)
            cache.layers[source + 1 :] = fresh.layers[source + 1 :]
            cache.turn.deferred[:] = self.waiting[source]
        for (index, each), state in self.learned_up_to(source).items():
            if each == evictor:
                cache.sieve_layers[index].state.update(state)
        return model.adopt(cache)

    def learned_up_to(self, source: int | None) -> dict[tuple[int, Evictor], dict[str, Any]]:
        """Copy what evictors have learned; layers behind `source` are read anew."""
        return {key: copy.deepcopy(state) for key, state in self.learned.items() if source is None or key[0] <= source}


def read_prefix(
    model: Any,
    plans: Iterable[Plan],
    input_ids: Tensor,
    chunk: int | None = None,
    room: int = 0,
    progress: Progress | None = None,
) -> SharedPrefix | None:
    """Read the beginning of prompts in full, for plans to come; None on a model that reads prompts at once only.

    Args:
        model: of transformers.
        plans: those to come. None of them may act on every chunk of a prompt.
        input_ids: int64 [1, N]; every prompt has more tokens than the plan that reads it looks back on.
        chunk: tokens per forward pass, None for all at once.
        room: tokens that may follow, which buffers leave room for.
        progress: called with (tokens read, tokens in all).
    """
    plans = list(plans)
    evictors = dict.fromkeys(plan.evict for plan in plans if plan.evict is not None and plan.evict.when.observes)
    hidden = any("hidden" in each.traits.needs for each in evictors)
    recorder = LayerRecorder(0, tuple(evictors))
    facts = AttachedModel(model, Plan())
    sources = sorted({source for plan in plans if (source := source_layer(facts, plan.propagate)) is not None})
    waiting: dict[int, list[DeferredChunk]] = {source: [] for source in sources}
    with attached(model, Plan(name="shared"), hidden=hidden, leaving=sources) as sieve, torch.no_grad():
        cache = sieve.new_cache()
        if cache.has_state and not sieve.continues:
            return None
        length = input_ids.shape[1]
        cache.begin_turn(length + room)
        cache.turn.length = length
        request = PassRequest(
            phase="prefill",
            last_chunk=False,
            on_layer=recorder.on_layer if evictors else None,
            on_leave=(lambda index, part: waiting[index].append(part)) if sources else None,
        )
        for start in range(0, length, chunk or length):
            sieve.feed(cache, input_ids[:, start : start + (chunk or length)], None, request)
            if progress is not None:
                progress(cache.num_seen, length)
    return SharedPrefix(cache, waiting, recorder.learned)


def source_layer(model: AttachedModel, propagate: Propagator | None) -> int | None:
    """Return the layer where leading chunks of a prompt wait, None where they go through all layers."""
    if propagate is None:
        return None
    source = propagate.first_layer(model.num_layers, model.context.layers)
    return source if source < model.num_layers - 1 else None
