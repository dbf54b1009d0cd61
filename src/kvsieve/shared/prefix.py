"""One prefill of a document for many questions.

Prompts with a common prefix need only one prefill of it: each continues as after the leading chunks of a chunked
prompt. This includes propagators: up to the first layer that may drop tokens they equal full KV, and the data that wait
there in a chunked prompt are recorded.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.hf.attach import attached
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.records import Conversation, DeferredChunk, Turn
from kvsieve.hf.prompt.chunks import BEGINNING, read_beginning
from kvsieve.hf.prompt.options import Progress, shifted
from kvsieve.hf.reuse import PromptStore, StoredPrefixes
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import Evictor, Propagator
from kvsieve.planning.roles.codec import ASKED
from kvsieve.types import LayerContext


@dataclass
class LayerRecorder:
    """Records the contexts of each layer, and calls observing evictors."""

    window: int
    evictors: tuple[Evictor, ...]
    seen: dict[int, LayerContext] = field(default_factory=dict)
    learned: dict[tuple[int, Evictor], dict[str, Any]] = field(default_factory=dict)

    def on_layer(self, ctx: LayerContext) -> None:
        """See PassRequest.on_layer."""
        for evictor in self.evictors:
            if evictor.when.observes:
                evictor.observe(dataclasses.replace(ctx, state=self.learned.setdefault((ctx.layer_idx, evictor), {})))
        if ctx.step.ends_prompt:
            # The window's tokens are all an evictor may look at, and those that keys are encoded for; the rest of
            # the queries would be as large as the cache.
            last = slice(-max(self.window, ASKED), None)
            query = ctx.query[:, :, last].clone()
            hidden = None if ctx.hidden is None else ctx.hidden[:, last].clone()
            output = None if ctx.output is None else ctx.output[:, :, last].clone()
            self.seen[ctx.layer_idx] = dataclasses.replace(ctx, query=query, hidden=hidden, output=output)


@dataclass
class SharedPrefix:
    """The common prefix of prompts, prefilled once. Only one prompt that continues it may be in use at a time.

    Attributes:
        cache: of it, in the middle of a prompt.
        waiting: by layer, the chunks that wait there for a propagator.
        learned: states of observing evictors, per layer and evictor.
        stored: tokens reused from a store.
        seconds: prefill time of all of it; 0 if not measured.
    """

    cache: SieveCache
    waiting: dict[int, list[DeferredChunk]]
    learned: dict[tuple[int, Evictor], dict[str, Any]]
    stored: int = 0
    seconds: float = 0.0

    def begins(self, model: AttachedModel, evictor: Evictor | None = None) -> SieveCache:
        """Return a cache that continues from here, on the same buffers, with the state of `evictor`."""
        cache = self.cache.fork(share=True)
        source = source_layer(model, model.plan.propagate)
        if source is not None:
            fresh = model.new_cache()
            fresh.advance(self.cache.num_seen)
            cache.layers[source + 1 :] = fresh.layers[source + 1 :]
            cache.turn.deferred[:] = self.waiting[source]
        for (index, learner), state in self.learned_up_to(source).items():
            if learner == evictor:
                cache.sieve_layers[index].state.update(state)
        return model.adopt(cache)

    def learned_up_to(self, source: int | None) -> dict[tuple[int, Evictor], dict[str, Any]]:
        """Copy the evictors' states; layers after `source` are prefilled again."""
        return {key: copy.deepcopy(state) for key, state in self.learned.items() if source is None or key[0] <= source}


@dataclass(frozen=True)
class PrefixNodes:
    """A store for prefixes shared by plans.

    Full KV's prefill is one node. The hidden states that wait for a propagator, and the state of an evictor, are each a
    node of the plan with that role alone.

    Attributes:
        store: the store.
        tokenizer: of the model.
    """

    store: PromptStore
    tokenizer: Any

    def find(self, model: Any, plans: Sequence[Plan], context: Tensor, leave: int) -> SharedPrefix | None:
        """Return the longest stored prefix of a context for all plans, or None.

        Args:
            model: of transformers.
            plans: future plans.
            context: int64 [1, N].
            leave: last tokens that do not belong to the prefix.
        """
        ids = context[0].tolist()
        prefix = None
        waiting: dict[int, list[DeferredChunk]] = {}
        learned: dict[tuple[int, Evictor], dict[str, Any]] = {}
        for reader in self._readers(model, plans):
            found = StoredPrefixes(self.store).find(reader, ids, None, leave)
            if found is None or ((waiting or learned) and found.cache.num_seen < len(ids) - leave):
                # Parts of different lengths do not form one prefix.
                return None
            cache = found.cache
            source = source_layer(reader, reader.plan.propagate)
            ids = ids[: cache.num_seen + leave]
            if source is not None:
                waiting[source] = list(cache.turn.deferred)
            elif reader.plan.evict is not None:
                learned |= {(at, reader.plan.evict): layer.state for at, layer in cache.sieve_layers.items()}
            else:
                # It may have been stored as a whole conversation; here it is the beginning of a prompt.
                cache.conversation = Conversation(cache.num_seen, 1, turn=Turn(reading=True))
                prefix = SharedPrefix(cache, waiting, learned, cache.num_seen, found.seconds)
        return prefix

    def add(self, model: Any, plans: Sequence[Plan], context: Tensor, prefix: SharedPrefix) -> None:
        """Store the prefilled tokens of a context."""
        for reader in self._readers(model, plans):
            cache = prefix.begins(reader, reader.plan.evict)
            # A prefill under this plan alone would have left the same.
            cache.owner = reader.new_cache().owner
            StoredPrefixes(self.store).add(reader, context[0].tolist(), cache, prefix.seconds, None)

    def _readers(self, model: Any, plans: Sequence[Plan]) -> Iterator[AttachedModel]:
        """Yield the model under each plan with nodes; full KV comes last."""
        roles = [Plan(propagate=part) for part in dict.fromkeys(plan.propagate for plan in plans) if part is not None]
        for plan in [*roles, *(Plan(evict=evictor) for evictor in _observers(plans)), Plan()]:
            reader = AttachedModel(model, plan)
            if plan.propagate is None or source_layer(reader, plan.propagate) is not None:
                reader.use_tokenizer(self.tokenizer)
                yield reader


def read_prefix(
    model: Any,
    plans: Sequence[Plan],
    context: Tensor,
    leave: int,
    *,
    chunk: int | None = None,
    room: int = 0,
    progress: Progress | None = None,
    stored: PrefixNodes | None = None,
) -> SharedPrefix | None:
    """Prefill the prefix of prompts for future plans; None on a model that only supports whole prompts.

    Args:
        model: of transformers.
        plans: future plans. None of them may act on every chunk of a prompt.
        context: int64 [1, N], the prefix and the tokens that follow it in every prompt.
        leave: last tokens to leave: at least the largest observation window.
        chunk: tokens per forward pass, None for all at once.
        room: tokens that may follow the context, for which buffers are reserved.
        progress: called with (tokens done, total tokens).
        stored: prefix store to find the prefix in, and to add it to.
    """
    began = time.perf_counter()
    length = context.shape[1] - leave
    evictors = _observers(plans)
    hidden = any("hidden" in evictor.traits.needs for evictor in evictors)
    recorder = LayerRecorder(0, evictors)
    facts = AttachedModel(model, Plan())
    sources = sorted({source for plan in plans if (source := source_layer(facts, plan.propagate)) is not None})
    known = None if stored is None else stored.find(model, plans, context, leave)
    with attached(model, Plan(name="shared"), hidden=hidden, leaving=sources) as sieve, torch.no_grad():
        cache = sieve.new_cache()
        if cache.has_state and not sieve.continues:
            return None
        known = known or SharedPrefix(cache, {source: [] for source in sources}, recorder.learned)
        waiting = known.waiting
        recorder.learned = known.learned
        request = dataclasses.replace(
            BEGINNING,
            on_layer=recorder.on_layer if evictors else None,
            on_leave=(lambda index, part: waiting[index].append(part)) if sources else None,
        )
        shown = shifted(progress, known.cache.num_seen, length)
        read_beginning(sieve, context[:, :length], known.cache, chunk, shown, request, room=leave + room)
    known.seconds += time.perf_counter() - began
    if stored is not None and known.stored < length:
        stored.add(model, plans, context, known)
    return known


def _observers(plans: Iterable[Plan]) -> tuple[Evictor, ...]:
    """Return the plans' evictors that observe every pass, without duplicates."""
    return tuple(dict.fromkeys(plan.evict for plan in plans if plan.evict is not None and plan.evict.when.observes))


def source_layer(model: AttachedModel, propagate: Propagator | None) -> int | None:
    """Return the layer at which leading chunks of a prompt wait, None if they pass all layers."""
    if propagate is None:
        return None
    source = propagate.first_layer(model.num_layers, model.context.layers)
    return source if source < model.num_layers - 1 else None
