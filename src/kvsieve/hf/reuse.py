"""Reading prompts whose beginning a store of prompts may have, and leaving it what was read.

The store itself is `kvsieve.store`; here is what of it is used.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvsieve.errors import InputError, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.generate.result import GenerateResult
from kvsieve.hf.generate.stats import Stats
from kvsieve.hf.prompt.chunks import shared_end
from kvsieve.hf.prompt.options import Progress, shifted
from kvsieve.hf.runtime import AttachedModel
from kvsieve.plans import Plan

# Last tokens of a prompt in front of which its last border lies: another question on the same document begins before.
LAST = 128
# Chunks between two borders that are stored of a model with recurrent state, whose shorter beginnings are lost.
STATES = 4
# What makes a reading its caller's own, which others cannot go on from.
_OWN = ("protect", "quotas", "question_tokens", "cache")


class FoundPrompt(Protocol):
    """The beginning of a prompt that was found; see kvsieve.store.Found."""

    @property
    def cache(self) -> SieveCache: ...

    @property
    def seconds(self) -> float: ...


@runtime_checkable
class PromptStore(Protocol):
    """The part of kvsieve.store.PrefixStore that is used here."""

    @property
    def find(self) -> Callable[..., FoundPrompt | None]: ...

    @property
    def add(self) -> Callable[..., object]: ...


class Begins(Protocol):
    """The part of a Sieve that is used here."""

    plan: Plan

    def new_cache(self) -> SieveCache: ...

    @property
    def begin(self) -> Callable[..., SieveCache]: ...

    @property
    def generate(self) -> Callable[..., GenerateResult]: ...


@dataclass(frozen=True)
class Begun:
    """The beginning of a prompt, found and read.

    Attributes:
        found: tokens that came from the store.
        seconds: what reading the tokens takes, or took, which the cache has read now.
        took: seconds that it took now.
    """

    found: int
    seconds: float
    took: float

    def with_reuse(self, stats: Stats) -> Stats:
        """Return statistics of the call that has read the rest as those of both."""
        note = f"{self.found} of {stats.prompt_tokens} tokens came from the store"
        notes = [*stats.notes, note] if self.found else stats.notes
        return dataclasses.replace(stats, ttft_s=stats.ttft_s + self.took, notes=notes)


@dataclass(frozen=True)
class Stored:
    """A store, for the prompts of one attached model. owner: whose prompts they are."""

    store: PromptStore
    owner: str = ""

    def suits(self, sieve: Any, options: dict[str, Any]) -> bool:
        """Tell that a prompt under a plan, with options of `generate`, may be read this way."""
        return _unserved(sieve, options) is None

    def begin(
        self,
        sieve: Begins,
        ids: Tensor,
        cache: SieveCache,
        chunk: int | None,
        progress: Progress | None,
        leave: int = 1,
    ) -> Begun:
        """Read a prompt but for its last tokens, of which a cache that is empty takes from the store what that has.

        Borders are left in the store: the last one, and one each time that the tokens read have doubled.

        Args:
            sieve: the attached model.
            ids: int64 [1, N], the whole conversation.
            cache: of the sieve; it has read the beginning, or nothing.
            chunk: tokens per forward pass, None for all at once.
            progress: called with (tokens read, tokens in all).
            leave: tokens that are left to read; 0 for a prompt that is only read.

        Returns:
            What was found and read.
        """
        known, total, before, began = ids[0].tolist(), ids.shape[1], 0.0, time.perf_counter()
        if not cache.num_seen:
            found = self.store.find(sieve, known, self.owner, turns=(total,), leave=leave, chunk=chunk)
            if found is not None:
                cache.become(found.cache)
                before = found.seconds
        start, searched = cache.num_seen, time.perf_counter()

        stored = start

        def border(done: int, length: int) -> None:
            nonlocal stored
            often = cache.has_state and chunk is not None and done // chunk % STATES == 0
            if done == length or often or start + done >= 2 * stored:
                stored = start + done
                self.store.add(sieve, known, cache, before + time.perf_counter() - searched, self.owner, chunk=chunk)
            if progress is not None:
                progress(start + done, total)

        # Chunks behind the last border end where they would without one.
        end = start + shared_end(sieve.plan, total - max(LAST, sieve.plan.queries(total)) - start, chunk)
        if end > start:
            sieve.begin(ids[:, :end], cache=cache, chunk=chunk, progress=border)
        now = time.perf_counter()
        return Begun(start if before else 0, before + now - searched, now - began)

    def generate(self, sieve: Begins, ids: Tensor, **options: Any) -> GenerateResult:
        """Answer a prompt int64 [1, N] as ``Sieve.generate`` does, beginning with what the store has of it."""
        cache, progress, total = sieve.new_cache(), options.pop("progress", None), ids.shape[1]
        begun = self.begin(sieve, ids, cache, options.get("chunk"), progress)
        rest = shifted(progress, cache.num_seen, total)
        result = sieve.generate(ids, torch.ones_like(ids), cache=cache, progress=rest, **options)
        self.end(sieve, result.sequences, cache, begun.seconds + result.stats.ttft_s, options.get("chunk"))
        return dataclasses.replace(result, stats=begun.with_reuse(result.stats))

    def end(self, sieve: Begins, ids: Tensor, cache: SieveCache, seconds: float, chunk: int | None) -> None:
        """Leave the store a conversation as it is at the end of a turn, read in so many seconds, `chunk` at a time."""
        self.store.add(sieve, ids[0].tolist(), cache, seconds, self.owner, chunk=chunk)

    def prefill(self, sieve: Any, ids: Tensor, cache: SieveCache, options: dict[str, Any]) -> None:
        """Read a prompt and answer nothing yet; options of ``Sieve.prefill``."""
        if not self.suits(sieve, options):
            sieve.prefill(ids, torch.ones_like(ids), cache=cache, **options)
            return
        begun = self.begin(sieve, ids, cache, options.get("chunk"), options.get("progress"), leave=0)
        if cache.num_seen < ids.shape[1]:
            began = time.perf_counter()
            sieve.prefill(ids, torch.ones_like(ids), cache=cache, **options)
            self.end(sieve, ids, cache, begun.seconds + time.perf_counter() - began, options.get("chunk"))


def why_not(model: AttachedModel) -> str | None:
    """Return why nothing that a plan reads on a model can be reused, one clause; None where it can."""
    if model.plan.shortens_prompt:
        return _plan_unserved(model.plan)
    if model.context.ranks.size > 1:
        return "heads are divided among several processes"
    if model.facts.tables.depend:
        return "the model's rotary tables depend on the length of the whole prompt"
    if model.new_cache().has_state and not model.continues:
        return "the model reads prompts in one piece only"
    return None


def answer(sieve: Any, ids: Tensor, options: dict[str, Any], store: PromptStore | None) -> GenerateResult:
    """Answer a prompt int64 [1, N] as ``Sieve.generate`` does, beginning with what a store has of it.

    Raises InputError where the store cannot serve it.
    """
    check_store(store)
    if store is None:
        return sieve.generate(ids, torch.ones_like(ids), **options)
    check_servable(sieve, options)
    return Stored(store).generate(sieve, ids, **options)


def check_servable(sieve: AttachedModel, options: Mapping[str, Any]) -> None:
    """Raise InputError where a store cannot serve a prompt under a plan, with options of `generate`."""
    _refuse(_unserved(sieve, options))


def check_plans(plans: Iterable[Plan]) -> None:
    """Raise InputError for a plan that a store can serve on no model."""
    for plan in plans:
        _refuse(_plan_unserved(plan))


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise InputError(f"the store cannot serve this prompt: {reason}; leave the store out")


def _unserved(sieve: AttachedModel, options: Mapping[str, Any]) -> str | None:
    """Return why a store cannot serve a prompt, one clause; None where it can."""
    own = [name for name in _OWN if options.get(name) is not None] + ["reduce"] * (not options.get("reduce", True))
    if own:
        return f"{own[0]}= makes its reading the caller's own"
    return _plan_unserved(sieve.plan) or why_not(sieve)


def _plan_unserved(plan: Plan) -> str | None:
    if plan.shortens_prompt:
        return f"{plan.name} reads the whole conversation again in every turn"
    return f"{plan.name} chooses among the tokens of the whole prompt" if plan.drafts else None


def check_store(store: Any) -> None:
    """Raise InputError unless `store` is None or a store of prompts."""
    if store is not None and not isinstance(store, PromptStore):
        raise InputError(
            f"store= takes a kvsieve.store.PrefixStore, got {short(store)}; open one with PrefixStore(path)"
        )
