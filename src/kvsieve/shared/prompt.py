"""One prefill of a prompt for many evictors.

Evictors that act once a prompt is complete change nothing during prefill, so all of them can start from the same full
cache. Their input is recorded per layer and passed to each in turn.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvsieve.errors import CacheStateError
from kvsieve.hf.attach import attached
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.evict import evict
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.model.support import check_model
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.read import read_prompt
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import Codec, Evictor, Propagator
from kvsieve.shared.prefix import LayerRecorder, SharedPrefix, source_layer
from kvsieve.types import LayerContext

# Tokens of a given answer fed at once, so that the logits of a long one need not all be held.
_PIECE = 64


@dataclass
class SharedPrompt:
    """A prompt prefilled once with full KV, ready to be reduced by any evictor.

    Attributes:
        cache: full KV.
        logits: [B, V] after the prompt's last token, which evictors do not change.
        seen: recorded context of each layer.
        window: number of recorded last queries.
        learned: states of observing evictors, per layer and evictor.
    """

    cache: SieveCache
    logits: Tensor
    seen: dict[int, LayerContext]
    window: int
    learned: dict[tuple[int, Evictor], dict[str, Any]] = field(default_factory=dict)

    def reduced(self, evictor: Evictor | None, codec: Codec | None = None, rest: Codec | None = None) -> SieveCache:
        """Return a cache as after a prefill under a plan with this evictor and these codecs.

        Raises CacheStateError for an evictor with a larger observation window than recorded, or one that observes
        passes and was not named for the prefill.
        """
        cache = self._evicted(evictor, Plan(evict=evictor, codec=codec, rest=rest))
        if codec is not None:
            for layer in cache.sieve_layers.values():
                layer.encode(codec, ends_prompt=True)
        return cache

    def _evicted(self, evictor: Evictor | None, plan: Plan) -> SieveCache:
        if evictor is None:
            return self.cache.fork()
        if evictor.window > self.window:
            raise CacheStateError(
                f"the evictor looks at {evictor.window} queries and {self.window} were recorded; raise window="
            )
        cache = self.cache.fork(share=True)
        for index in self.seen if evictor.when.observes else ():
            learned = self.learned.get((index, evictor))
            if learned is None:
                raise CacheStateError(
                    f"{type(evictor).__name__} observes every pass of a prompt and was not there; name it in evictors="
                )
            cache.sieve_layers[index].state.update(copy.deepcopy(learned))
        notes: dict[str, Any] = {}
        for index, ctx in self.seen.items():
            evict(plan, dataclasses.replace(ctx, state=cache.sieve_layers[index].state, shared=notes), cache)
        for index in self.seen:
            cache.turn.record.kept[index] = cache.sieve_layers[index].store.entries
        _own_buffers(cache)
        return cache


def _own_buffers(cache: SieveCache) -> None:
    """Copy the shared buffers that a layer of a cache writes to; evicted layers have their own."""
    layer: Any
    for index, layer in enumerate(cache.all_layers):
        dropped = layer.view is None and index in cache.turn.record.evicted
        if layer.memory is not None and not dropped and not layer.memory.is_empty:
            layer.store = layer.store.clone()


def read_shared(
    model: Any,
    propagate: Propagator | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    window: int,
    evictors: Iterable[Evictor | None] = (),
    options: ReadOptions | None = None,
    prefix: SharedPrefix | None = None,
) -> SharedPrompt:
    """Prefill a prompt once, under `propagate` alone, for evictors with observation windows up to `window`.

    Args:
        model: of transformers.
        propagate: None for full KV.
        input_ids: int64 [B, N].
        attention_mask: [B, N], None without padding.
        window: queries to record.
        evictors: future evictors, including all that observe passes.
        options: of the prefill; None for all at once.
        prefix: prefilled prefix of the prompt, for these evictors and `propagate`, or None.

    Raises:
        The errors of `attach` and `Sieve.prefill`.
    """
    known = tuple(dict.fromkeys(evictor for evictor in evictors if evictor is not None))
    # Messages name those with the largest observation window.
    name = " and ".join(dict.fromkeys(type(evictor).__name__ for evictor in known if evictor.window == window))
    recorder = LayerRecorder(window, known)
    plan = Plan(propagate=propagate, name=name or "shared")
    for evictor in known:
        check_model(model, Plan(evict=evictor))
    options = options or ReadOptions()
    options = dataclasses.replace(options, window=window, on_layer=recorder.on_layer, goes_on=prefix is not None)
    hidden = any("hidden" in evictor.traits.needs for evictor in known)
    with attached(model, plan, hidden=hidden) as sieve, torch.no_grad():
        if prefix is None:
            cache = sieve.new_cache()
        else:
            cache = prefix.begins(sieve)
            recorder.learned = prefix.learned_up_to(source_layer(sieve, propagate))
        ids, mask = read_prompt(sieve, input_ids, attention_mask, cache, options)
        request = PassRequest(phase="prefill", on_layer=recorder.on_layer)
        logits = sieve.feed(cache, ids[:, cache.num_seen :], mask, request, logits=1).logits
    assert logits is not None
    return SharedPrompt(cache, logits[:, -1], recorder.seen, window, recorder.learned)


def read_alone(
    model: Any,
    plan: Plan,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    options: ReadOptions | None = None,
    prefix: SharedPrefix | None = None,
) -> tuple[SieveCache, Tensor, Tensor]:
    """Prefill a prompt under a plan: its cache, the logits [B, V] after its last token, and the ids that were fed.

    These are `input_ids`, or the ids of a short prompt under a plan that shortens it: append further tokens to them.
    `prefix` is as for `read_shared`.
    """
    options = options or ReadOptions()
    with attached(model, plan) as sieve, torch.no_grad():
        if prefix is None:
            cache = sieve.new_cache()
        elif plan.shortens_prompt:
            cache = sieve.new_cache()
            options = dataclasses.replace(options, begun=functools.partial(prefix.begins, sieve))
        else:
            cache = prefix.begins(sieve, plan.evict)
            options = dataclasses.replace(options, goes_on=True)
        ids, mask = read_prompt(sieve, input_ids, attention_mask, cache, options)
        logits = next_logits(sieve, cache, ids, mask)[:, -1]
        if prefix is not None and not plan.shortens_prompt:
            _own_buffers(cache)
        return cache, logits, ids


def next_logits(
    model: AttachedModel,
    cache: SieveCache,
    input_ids: Tensor,
    mask: Tensor | None = None,
    keep: int = 1,
    phase: Literal["prefill", "decode"] | None = None,
) -> Tensor:
    """Feed the new part of the conversation [B, N] to the cache; return logits [B, keep, V] of the last tokens.

    Args:
        model: the attached model.
        cache: of it.
        input_ids: int64 [B, N].
        mask: [B, N], required with padding.
        keep: logits of so many last tokens.
        phase: "decode" for tokens of an answer that is given rather than generated; see PassRequest.
    """
    found = model.feed(cache, input_ids[:, cache.num_seen :], mask, PassRequest(phase=phase), logits=keep).logits
    assert found is not None
    return found


def after_prompt(plan: Plan) -> Plan:
    """Return the part of a plan that acts after the prompt."""
    rest = dataclasses.replace(plan, propagate=None, prefill=None)
    if rest.when.chunks or rest.when.steps or rest.is_view:
        return rest
    return Plan(read=plan.read, codec=plan.codec, name="full")


def answer_logits(model: AttachedModel, cache: SieveCache, ids: Tensor, wanted: Sequence[int] | None = None) -> Tensor:
    """Feed a given answer; each token attends as if generated.

    Args:
        model: the attached model; only the part of its plan that acts after a prompt acts.
        cache: of it, with the prompt; modified.
        ids: int64 [B, T], the answer's tokens.
        wanted: columns to return logits for, ascending; None for all.

    Returns:
        Logits [B, T or len(wanted), V] after these tokens.
    """
    columns = range(ids.shape[1]) if wanted is None else wanted
    parts = []
    for start in range(0, ids.shape[1], _PIECE):
        piece = ids[:, start : start + _PIECE]
        found = model.feed(cache, piece, None, PassRequest(phase="decode"), logits=piece.shape[1]).logits
        assert found is not None
        parts.append(found[:, [column - start for column in columns if start <= column < start + piece.shape[1]]])
    return torch.cat(parts, 1)
