"""One reading of a prompt for many evictors.

Evictors that act once a prompt is complete change nothing while it is read, so all of them can start from the same
full cache. What they would have been shown is recorded per layer and handed to each in turn.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsieve.budget import Budget
from kvsieve.errors import CacheStateError
from kvsieve.hf.attach import attach
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.evict import evict
from kvsieve.hf.prompt.read import read_prompt
from kvsieve.plans import Plan
from kvsieve.roles import Evictor, Traits
from kvsieve.types import LayerContext, Selection, When

if TYPE_CHECKING:
    from kvsieve.roles import Propagator


@dataclass(frozen=True)
class _Recorder(Evictor):
    """An evictor that keeps everything and remembers what each layer was shown.

    learned: what those of `evictors` that look at every pass have put into their state, per layer and evictor.
    """

    window: int = 0
    evictors: tuple[Evictor, ...] = ()
    seen: dict[int, LayerContext] = field(default_factory=dict, compare=False)
    learned: dict[tuple[int, Evictor], dict[str, Any]] = field(default_factory=dict, compare=False)
    budget: Budget = Budget(ratio=1.0)

    @property
    def when(self) -> When:
        return When(observes=any(each.when.observes for each in self.evictors))

    @property
    def traits(self) -> Traits:
        return Traits(needs=tuple(need for each in self.evictors for need in each.traits.needs))

    def observe(self, ctx: LayerContext) -> None:
        for each in dict.fromkeys(each for each in self.evictors if each.when.observes):
            each.observe(dataclasses.replace(ctx, state=self.learned.setdefault((ctx.layer_idx, each), {})))

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        # The window's queries are all an evictor may look at; the rest of them would be as large as the cache.
        query = ctx.query[:, :, -max(self.window, 1) :].clone()
        self.seen[ctx.layer_idx] = dataclasses.replace(ctx, query=query)
        return None


@dataclass
class SharedPrompt:
    """A prompt that was read once, in full, ready to be reduced by any evictor.

    cache: everything the layers saw. logits: [B, V] after the prompt's last token, which evictors do not change.
    """

    cache: SieveCache
    logits: Tensor
    seen: dict[int, LayerContext]
    window: int
    learned: dict[tuple[int, Evictor], dict[str, Any]] = field(default_factory=dict)

    def reduced(self, evictor: Evictor | None) -> SieveCache:
        """A cache of its own, as if the prompt had been read under a plan with this evictor.

        Raises CacheStateError for an evictor that looks at more queries than were recorded, or at every pass of the
        prompt without having been named when it was read.
        """
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
                    f"{type(evictor).__name__} looks at every pass of a prompt and was not there; name it in evictors="
                )
            cache.sieve_layers[index].state.update(copy.deepcopy(learned))
        notes: dict[str, Any] = {}
        for index, ctx in self.seen.items():
            evict(evictor, dataclasses.replace(ctx, state=cache.sieve_layers[index].state, shared=notes), cache)
        for index in self.seen:
            layer = cache.sieve_layers[index]
            cache.record.kept[index] = layer.store.entries
            if index not in cache.record.evicted or layer.view is not None:
                layer.store = layer.store.clone()
        return cache


def read_shared(
    model: Any,
    propagate: Propagator | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    window: int,
    evictors: Iterable[Evictor | None] = (),
    chunk: int | None = None,
    new_tokens: int = 0,
    name: str = "shared",
) -> SharedPrompt:
    """Read a prompt once, under `propagate` alone, for evictors that look at its last `window` queries at most.

    input_ids: int64 [B, N]. evictors: those to come; those that look at every pass must be there. new_tokens: expected
    after it. name: who reads, for messages. Raises what `attach` and `Sieve.prefill` raise.
    """
    recorder = _Recorder(window, tuple(each for each in evictors if each is not None))
    plan = Plan(propagate=propagate, evict=recorder, name=name)
    cache, logits, _ = read_alone(model, plan, input_ids, attention_mask, chunk=chunk, new_tokens=new_tokens)
    return SharedPrompt(cache, logits, recorder.seen, window, recorder.learned)


def read_alone(
    model: Any,
    plan: Plan,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    chunk: int | None = None,
    new_tokens: int = 0,
) -> tuple[SieveCache, Tensor, Tensor]:
    """Read a prompt under a plan: its cache, the logits [B, V] after its last token, and the ids that were fed.

    These are `input_ids`, or the ids that were read again under a plan that shortens the prompt: what follows is
    appended to them.
    """
    with attach(model, plan) as sieve, torch.no_grad():
        cache = sieve.new_cache()
        ids, mask = read_prompt(sieve, input_ids, attention_mask, cache, chunk=chunk, new_tokens=new_tokens)
        return cache, next_logits(model, cache, ids, mask)[:, -1], ids


def next_logits(model: Any, cache: SieveCache, input_ids: Tensor, mask: Tensor | None = None, keep: int = 1) -> Tensor:
    """Feed what of the whole conversation [B, N] the cache has not seen; logits [B, keep, V] of the last tokens.

    Call it inside ``attach``. `mask`: [B, N], needed where anything is padding.
    """
    device = model.device
    positions = None
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, cache.num_seen :].to(device)
        mask = mask.to(device)
    out = model(
        input_ids=input_ids[:, cache.num_seen :].to(device),
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
    )
    return out.logits
