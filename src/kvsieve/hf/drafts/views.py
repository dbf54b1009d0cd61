"""The model itself as drafter, under another plan's view of the same cache.

A reader's view is the cache itself: its tokens are fed to it, and taken back before they are verified. A view by an
evictor or a codec is a smaller copy, made when drafting begins, that the answer's tokens are appended to.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvsieve.cache import keep
from kvsieve.core.selection import pack_ragged
from kvsieve.errors import PlanError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.records import TurnRecord
from kvsieve.hf.compat import tensor_parallel_mesh
from kvsieve.hf.drafts.draft_passes import DraftPasses, greedy, shared_length
from kvsieve.hf.drafts.drafter import Drafter
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.forward.sparse_read import reading_of
from kvsieve.hf.model.settle import plan_for
from kvsieve.hf.model.support import check_model
from kvsieve.hf.prompt.draft import ends_of
from kvsieve.hf.runtime import AttachedModel
from kvsieve.models.quantized import weight_bytes
from kvsieve.planning.named import plan as parsed
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import ChunkedEvictor, Codec, Evictor, ProbingEvictor

_WORKS = "name a reader such as quest, an evictor such as snapkv or lagkv, or a codec such as kivi"


def checked_view(text: str, model: AttachedModel) -> Plan:
    """Return the plan of a view, complete for a model.

    Args:
        text: the plan, such as "quest:budget=5%".
        model: attached under the plan that decodes.

    Raises:
        PlanError: the plan is unknown, or gives no view of a stored cache.
        UnsupportedModelError: it cannot run on the model.
        UnsupportedOptionError: heads are divided among processes.
    """
    plan = plan_for(parsed(text), model.model, model.tokenizer)
    reason = _why_no_view(plan, model.plan)
    if reason is not None:
        raise PlanError(f"draft='self:{text}': {plan.name} gives no view of a stored cache: {reason}; {_WORKS}")
    check_model(model.model, plan)
    if tensor_parallel_mesh(model.model) is not None:
        raise UnsupportedOptionError(
            f"draft='self:{text}': heads are divided among processes, where views are not supported: use draft='lookup'"
        )
    return plan


def _why_no_view(plan: Plan, verified: Plan) -> str | None:
    """Return a clause why a plan gives no view of what another one has stored, or None."""
    evictor = plan.evict
    if not plan.roles:
        return "it reads everything, so a draft would cost as much as the answer"
    if plan.roles == ("codec",) and plan.codec == verified.codec:
        return "the cache is encoded so already"
    if plan.propagate is not None:
        return "it drops tokens between layers while a prompt is prefilled, and a view begins with a stored prompt"
    if plan.scores_entries:
        return "it scores entries by the queries of the whole prompt, which are not stored"
    if plan.prefill is not None:
        return "its sparse prefill is about prompts, and a view begins with a stored one"
    return None if evictor is None else _why_not_evicted(evictor)


def _why_not_evicted(evictor: Evictor) -> str | None:
    """Return a clause why an evictor gives no view, or None."""
    if isinstance(evictor, ChunkedEvictor):
        return "it compresses a prompt while it is prefilled, and a view begins with a stored one"
    if isinstance(evictor, ProbingEvictor):
        return "it chooses by further passes over the prompt, which cost more than drafts save"
    if evictor.traits.is_view:
        return "it drops nothing, so its copy would be as large as the cache; name the method within it"
    if evictor.when.observes:
        return "it needs the queries of the whole prompt, which are not stored"
    for need, words in (("hidden", "hidden states"), ("tokens", "token ids")):
        if need in evictor.traits.needs:
            return f"it needs {words}, which are not stored"
    return None


def check_view_of(cache: SieveCache, plan: Plan, rows: int) -> None:
    """Raise UnsupportedOptionError if a cache, for `rows` answers, allows no view by a plan of `checked_view`."""
    reason = _why_not_of(cache, plan, rows)
    if reason is not None:
        raise UnsupportedOptionError(f"draft='self:{plan.name}' is no view of this cache: {reason}")


def view_drafter(model: AttachedModel, cache: SieveCache, plan: Plan, row: int = 0) -> Drafter:
    """Return a drafter of one row of a cache under a view of it.

    Args:
        model: attached under the plan that decodes the cache.
        cache: with a complete prompt.
        plan: of `checked_view`.
        row: of the cache.

    Raises:
        UnsupportedOptionError: the cache allows no such view.
    """
    check_view_of(cache, plan, cache.conversation.batch)
    return ReaderDrafter(model, cache, plan) if plan.roles == ("read",) else CopyDrafter(model, cache, plan, row)


def _why_not_of(cache: SieveCache, plan: Plan, rows: int) -> str | None:
    """Return a clause why a cache allows no view by a plan, or None. rows: answers, each of a row."""
    if plan.roles == ("read",):
        if cache.conversation.parallel is not None:
            return "its documents are at the same positions, and a reader attends to chosen entries; name a codec"
        why = f"a reader drafts on the cache itself, which holds {rows} rows; ask them one by one, or name an evictor"
        return why if rows > 1 else None
    layers = cache.sieve_layers.values()
    if plan.codec is not None and any(layer.store.log_weight is not None for layer in layers):
        return "its entries have weights, which codecs do not keep; name a reader or an evictor"
    if plan.evict is None:
        return None
    reader = "name a reader or a codec, such as quest or kivi"
    verified = cache.owner.plan
    if cache.has_state:
        return f"an evictor's view reads the last tokens again, which recurrent layers cannot; {reader}"
    if cache.conversation.short_prompt is not None or verified.shortens_prompt:
        return f"an evictor's view reads the last tokens again, and {verified.name} has left some out; {reader}"
    divides = verified.evict is not None and verified.evict.traits.ragged and not verified.is_view
    if (divides or any(layer.store.is_ragged for layer in layers)) and not plan.evict.traits.ragged:
        return (
            f"its heads keep different numbers of entries, and {type(plan.evict).__name__} takes equal ones; name "
            "adakv, a reader or a codec"
        )
    return None


class ReaderDrafter(Drafter):
    """Drafts on the cache itself with a reader; everything is taken back before it returns.

    Args:
        model: attached under the plan that decodes the cache.
        cache: of one row.
        plan: the reader's.
    """

    free = False

    def __init__(self, model: AttachedModel, cache: SieveCache, plan: Plan) -> None:
        self.cost = _cost(model, cache)
        self._passes = DraftPasses(model, cache, plan)
        self._newest = -1

    def extend(self, tokens: Sequence[int]) -> None:
        self._newest = tokens[-1] if tokens else self._newest

    def propose(self, most: int) -> list[int]:
        passes = self._passes
        model = passes.model
        with _untouched(passes.cache):
            logits = passes.draft(self._newest)
            self._check_reads_less()
            tokens, fed = greedy(passes, logits, most, ends_of(model), model.config.vocab_size)
            passes.take_back(fed + 1)
        return tokens

    def _check_reads_less(self) -> None:
        """Raise UnsupportedOptionError if the reader reads everything that is stored."""
        passes = self._passes
        assert passes.plan is not None
        layers = passes.cache.sieve_layers.items()
        count = passes.model.num_layers
        if all(reading_of(passes.plan.read, passes.cache, layer, index, count) is None for index, layer in layers):
            raise UnsupportedOptionError(
                f"{passes.plan.name} reads all entries stored of {passes.cache.num_seen} tokens, so a draft would cost "
                "as much as the answer: give a smaller budget"
            )


def _cost(model: AttachedModel, cache: SieveCache) -> float:
    """Return the least time of drafting a token: that of the weights, in the time of weights and one row's entries."""
    weights = weight_bytes(model.model)
    return weights / (weights + cache.nbytes() / cache.conversation.batch)


@contextlib.contextmanager
def _untouched(cache: SieveCache) -> Iterator[None]:
    """Let passes run on a cache that are all taken back: no record of them stays, and failed ones are undone."""
    before = cache.snapshot()
    record = cache.turn.record
    cache.turn.record = TurnRecord()
    try:
        yield
    except BaseException:
        cache.rollback(before)
        raise
    finally:
        cache.turn.record = record


class CopyDrafter(Drafter):
    """Drafts on a reduced copy of the cache, made with the first proposal.

    Args:
        model: attached under the plan that decodes the cache.
        cache: of the conversation; its tokens are all but the newest.
        plan: of the copy.
        row: of the cache.
    """

    free = False

    def __init__(self, model: AttachedModel, cache: SieveCache, plan: Plan, row: int = 0) -> None:
        self.cost = _cost(model, cache)
        self._model = model
        self._cache = cache
        self._plan = plan
        self._row = row
        self._passes: DraftPasses | None = None
        self._tokens: list[int] = []
        # Tokens at the end of the copy that were drafted, and the number before them.
        self._drafted: list[int] = []
        self._fed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def propose(self, most: int) -> list[int]:
        model = self._model
        if self._passes is None:
            self._passes = DraftPasses(model, self.copied(), self._plan)
            self._fed = len(self._tokens) - 1
        passes = self._passes
        new = self._tokens[self._fed :]
        same = min(shared_length(self._drafted, new), len(new) - 1)
        passes.take_back(len(self._drafted) - same)
        self._drafted = []
        logits = passes.feed(new[same:])
        self._fed = len(self._tokens)
        tokens, fed = greedy(passes, logits, most, ends_of(model), model.config.vocab_size)
        self._drafted = tokens[:fed]
        return tokens

    def close(self) -> None:
        self._passes = None

    def copied(self) -> SieveCache:
        """Return the row's entries as the plan would have left them."""
        plan = self._plan
        view = self._cache.fork(share=self._cache.conversation.batch == 1)
        view.owner = dataclasses.replace(view.owner, plan=plan)
        if view.conversation.batch > 1:
            view.batch_select_indices(torch.tensor([self._row]))
        if plan.evict is not None:
            self._evict(view)
            return view
        layer: Any
        for layer in view.all_layers:
            if layer.memory is not None:
                _encode(layer, plan.codec if layer.is_growing else None)
        return view

    def _evict(self, view: SieveCache) -> None:
        """Prefill the prompt's last tokens again, under the plan, after the entries of the others."""
        plan = self._plan
        turn = view.turn
        assert plan.evict is not None
        mask = view.conversation.mask
        length = view.conversation.longest
        own = min(length, view.num_seen - turn.start)
        again = min(max(plan.queries(own), 1), own)
        if plan.evict.entries(length, turn.new_tokens) >= length or again == length:
            raise UnsupportedOptionError(
                f"{plan.name} keeps all of {length} tokens, so a draft would cost as much as the answer: give a "
                "smaller budget, or draft='lookup'"
            )
        if mask is not None and not bool(mask[:, -again:].all()):
            raise UnsupportedOptionError(
                f"padding is among the last {again} tokens of a row, which {plan.name} reads again: ask rows one by one"
            )
        for growing in view.sieve_layers.values():
            growing.state = {}
            growing.view = None
        layer: Any
        for layer in view.all_layers:
            if layer.memory is not None:
                # Windows number tokens without padding.
                _cut(layer, (view.num_seen if layer.is_growing else length) - again, again)
        view.advance(-again)
        view.conversation.mask = None if mask is None else mask[:, :-again]
        turn.resume(view.num_seen + again, turn.new_tokens, acts=True)
        turn.decoded = 0
        ids = torch.tensor([self._tokens[-again - 1 : -1]])
        self._model.feed(view, ids, mask, PassRequest(plan, "prefill"))


def _encode(layer: Any, codec: Codec | None) -> None:
    """Give a layer that shares its entries with another its own, encoded unless `codec` is None."""
    before = layer.store
    if codec is not None:
        if before.is_encoded:
            layer.store = before.padded()
        layer.encode(codec, ends_prompt=True)
    if layer.store is before:
        layer.store = before.clone()


def _cut(layer: Any, end: int, room: int) -> None:
    """Drop the entries of tokens from `end` on, and give a layer that shares its entries with another its own.

    room: tokens that follow.
    """
    store = layer.store.padded() if layer.store.is_encoded else layer.store
    stays = store.index < end
    if store.valid is not None:
        stays = stays & store.valid
    layer.store = keep(store, pack_ragged(stays.expand(-1, store.heads, -1)), room)
