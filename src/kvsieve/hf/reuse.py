"""Continuation of stored prefixes: the one policy of library, chats, command line and server.

The store itself is `kvsieve.store`; this module has its interface.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from kvsieve.planning.plans import Plan

# Tokens after a prompt's last border: another question on the same document begins within them.
LAST = 128
# Chunks between two borders of a model with recurrent state: its prefixes cannot be cut from longer ones.
STATES = 4
# Tokens below which prefilling is quicker than finding.
LEAST = 32
# Options that make a prefill unusable for other callers.
_OWN = ("protect", "quotas", "question_tokens", "cache")


class FoundPrompt(Protocol):
    """A stored prefix of a prompt; see kvsieve.store.Found."""

    @property
    def cache(self) -> SieveCache: ...

    @property
    def seconds(self) -> float: ...


@runtime_checkable
class PromptStore(Protocol):
    """The used part of kvsieve.store.PrefixStore."""

    @property
    def find(self) -> Callable[..., FoundPrompt | None]: ...

    @property
    def covered(self) -> Callable[..., int]: ...

    @property
    def add(self) -> Callable[..., object]: ...

    @property
    def add_prompt(self) -> Callable[..., object]: ...


@dataclass(frozen=True)
class ReadPrefix:
    """A prefix of a prompt, found and prefilled.

    Attributes:
        found: tokens reused from the store.
        seconds: time to prefill all of it.
        took: seconds that it took this time.
        approximate: rules by which the reused tokens' entries are approximate.
    """

    found: int = 0
    seconds: float = 0.0
    took: float = 0.0
    approximate: tuple[str, ...] = ()

    def with_reuse(self, stats: Stats) -> Stats:
        """Return the statistics of both, given those of the call that has prefilled the rest."""
        note = f"{self.found} of {stats.prompt_tokens} tokens came from the store{approximately(self.approximate)}"
        notes = [*stats.notes, note] if self.found else stats.notes
        return dataclasses.replace(stats, ttft_s=stats.ttft_s + self.took, notes=notes)


@dataclass(frozen=True)
class StoredPrefixes:
    """A prefix store, for the prompts of one owner.

    A prompt continues from the longest stored prefix with an identical prefill, so the answer is that of a new prefill,
    except after an approximate prefix, which only a prompt that names its rules gets.
    A driver calls `find` first, and `add` at each border and at the end of prompt or turn.

    Attributes:
        store: of prefixes.
        owner: of the prefixes.
        session: continue the owner's conversation with the entries left by earlier turns, as a chat does on its cache.
        approximate: rules of approximate prefixes that may serve its prompts, such as ("edit:window=32",); default ().
    """

    store: PromptStore
    owner: str = ""
    session: bool = False
    approximate: tuple[str, ...] = ()

    def find(
        self, sieve: Any, ids: Sequence[int], chunk: int | None, leave: int = 1, *, ends: bool = True
    ) -> FoundPrompt | None:
        """Return the longest stored prefix of a prompt, or None.

        Args:
            sieve: the attached model.
            ids: the prompt's tokens.
            chunk: tokens per forward pass, None for all at once.
            leave: tokens left to prefill; 0 for a prompt without an answer.
            ends: False for the beginning of a longer prompt.
        """
        turns = self._turns(ids) if ends else ()
        options = {"turns": turns, "leave": leave, "chunk": chunk, "approximate": self.approximate}
        return self.store.find(sieve, ids, self.owner, **options)

    def covered(self, sieve: Any, ids: Sequence[int], chunk: int | None) -> int:
        """Return the number of a prompt's tokens that `find` would return; see there."""
        turns = self._turns(ids)
        return self.store.covered(sieve, ids, self.owner, turns=turns, chunk=chunk, approximate=self.approximate)

    def _turns(self, ids: Sequence[int]) -> tuple[int, ...] | None:
        return None if self.session else (len(ids),)

    def is_border(self, plan: Plan, cache: SieveCache, chunk: int | None, last: bool) -> bool:
        """Return True if a cache's prefix is to be stored: the last one, or one that no longer one contains.

        The latter are stored each time the number of chunks has doubled, or every few with recurrent layers.

        Args:
            plan: of the prompt.
            cache: between two passes over it.
            chunk: tokens per forward pass, None for all at once.
            last: True before the prompt's last pass.
        """
        chunks = 0 if chunk is None else cache.num_seen // chunk
        often = chunks & (chunks - 1) == 0 or (cache.has_state and chunks % STATES == 0)
        inner = chunks > 0 and often and (cache.forgets or not may_cut(plan))
        return (last or inner) and cache.num_seen >= LEAST and not self.session

    def add(
        self, sieve: Any, ids: Sequence[int], cache: SieveCache, seconds: float, chunk: int | None, *, anew: bool = True
    ) -> None:
        """Store the content of a cache; by default only if a longer prompt may continue from it."""
        add = self.store.add_prompt if anew and not self.session else self.store.add
        add(sieve, ids, cache, seconds, self.owner, chunk=chunk)

    def begin(
        self,
        sieve: Any,
        ids: Tensor,
        cache: SieveCache,
        chunk: int | None,
        progress: Progress | None,
        leave: int = 1,
        *,
        ends: bool = True,
    ) -> ReadPrefix:
        """Prefill all but the last tokens of a prompt, from the longest stored prefix if the cache is empty.

        Args:
            sieve: the attached model.
            ids: int64 [1, N], the whole conversation.
            cache: of the sieve; with a prefix, or empty.
            chunk: tokens per forward pass, None for all at once.
            progress: called with (tokens done, total tokens).
            leave: see `find`.
            ends: see `find`.
        """
        known = ids[0].tolist()
        total = ids.shape[1]
        began = time.perf_counter()
        found = None if cache.num_seen else self.find(sieve, known, chunk, leave, ends=ends)
        rules: tuple[str, ...] = ()
        if found is not None:
            cache.become(found.cache)
            rules = cache.conversation.approximate
        before = 0.0 if found is None else found.seconds
        start = cache.num_seen
        searched = time.perf_counter()

        def store() -> None:
            self.add(sieve, known, cache, before + time.perf_counter() - searched, chunk)

        def border(done: int, length: int) -> None:
            if self.is_border(sieve.plan, cache, chunk, last=done == length):
                store()
            try:
                if progress is not None:
                    progress(start + done, total)
            except BaseException:
                # A stopped long prompt may be sent again.
                store()
                raise

        # Chunks after the last border end where they would without one.
        end = start + shared_end(sieve.plan, total - max(LAST, sieve.plan.queries(total)) - start, chunk)
        if end > start:
            sieve.begin(ids[:, :end], cache=cache, chunk=chunk, progress=border)
        now = time.perf_counter()
        return ReadPrefix(0 if found is None else start, before + now - searched, now - began, rules)

    def generate(self, sieve: Any, ids: Tensor, **options: Any) -> GenerateResult:
        """Answer a prompt int64 [1, N] as ``Sieve.generate`` does, from the longest stored prefix."""
        cache = sieve.new_cache()
        progress = options.pop("progress", None)
        chunk = options.get("chunk")
        begun = self.begin(sieve, ids, cache, chunk, progress)
        rest = shifted(progress, cache.num_seen, ids.shape[1])
        result = sieve.generate(ids, torch.ones_like(ids), cache=cache, progress=rest, **options)
        self.add(sieve, result.sequences[0].tolist(), cache, begun.seconds + result.stats.ttft_s, chunk)
        return dataclasses.replace(result, stats=begun.with_reuse(result.stats))

    def prefill(
        self, sieve: Any, ids: Tensor, cache: SieveCache, options: dict[str, Any], *, ends: bool = True
    ) -> ReadPrefix:
        """Prefill a prompt int64 [1, N] as ``Sieve.prefill`` does with options, from the longest stored prefix.

        ends: False for the beginning of a longer prompt, as ``Sieve.begin`` does.
        """
        chunk = options.get("chunk")
        progress = options.get("progress")
        begun = self.begin(sieve, ids, cache, chunk, progress, leave=0, ends=ends)
        if cache.num_seen < ids.shape[1]:
            began = time.perf_counter()
            options = {**options, "progress": shifted(progress, cache.num_seen, ids.shape[1])}
            if ends:
                sieve.prefill(ids, torch.ones_like(ids), cache=cache, **options)
            else:
                sieve.begin(ids, cache=cache, **options)
            seconds = begun.seconds + time.perf_counter() - began
            # The same text may be read ahead again.
            self.add(sieve, ids[0].tolist(), cache, seconds, chunk, anew=False)
        return begun


def approximately(rules: Sequence[str]) -> str:
    """Return the end of a note on stored tokens: rules by which their entries are approximate, "" for none."""
    return f", approximate by {', '.join(rules)}" if rules else ""


def answer(sieve: Any, ids: Tensor, options: dict[str, Any], store: PromptStore | None) -> GenerateResult:
    """Answer a prompt int64 [1, N] as ``Sieve.generate`` does, from the longest prefix in a store.

    Raises InputError if the store cannot serve it.
    """
    check_store(store)
    if store is None:
        return sieve.generate(ids, torch.ones_like(ids), **options)
    check_servable(sieve, options)
    return StoredPrefixes(store).generate(sieve, ids, **options)


def acts_at_end(plan: Plan) -> bool:
    """Return True if a plan drops, encodes or chooses entries at the end of a prompt."""
    return plan.drops or plan.is_view or plan.codec is not None or plan.prefill is not None


def may_cut(plan: Plan) -> bool:
    """Return True if the first exact entries equal those of a shorter prefill.

    Entries of sparse prompts depend on the ends of passes, chunked evictors have acted before, and propagators need the
    hidden states of the whole prompt, which are not stored.
    """
    return plan.prefill is None and plan.propagate is None and not plan.when.chunks


def why_not(model: AttachedModel) -> str | None:
    """Return a clause why a plan's conversations on a model cannot be reused, or None."""
    if model.plan.shortens_prompt or model.plan.scores_entries:
        return _plan_unserved(model.plan)
    if model.context.ranks.size > 1:
        return "heads are divided among several processes"
    if model.facts.tables.depend:
        return "the model's rotary tables depend on the length of the whole prompt"
    if model.new_cache().has_state and not model.continues:
        return "the model reads prompts in one piece only"
    return None


def unserved(sieve: Any, options: Mapping[str, Any]) -> str | None:
    """Return a clause why a store cannot serve a prompt under a plan with options of `generate`, or None."""
    own = [name for name in _OWN if options.get(name) is not None] + ["reduce"] * (options.get("reduce") is False)
    if own:
        return f"{own[0]}= makes its reading the caller's own"
    return _plan_unserved(sieve.plan) or why_not(sieve)


def check_servable(sieve: Any, options: Mapping[str, Any]) -> None:
    """Raise InputError if a store cannot serve a prompt; see `unserved`."""
    _refuse(unserved(sieve, options))


def check_plans(plans: Iterable[Plan]) -> None:
    """Raise InputError for a plan that a store can serve on no model."""
    for plan in plans:
        _refuse(_plan_unserved(plan))


def check_store(store: Any) -> None:
    """Raise InputError unless `store` is None or a store of prompts."""
    if store is not None and not isinstance(store, PromptStore):
        raise InputError(
            f"store= takes a kvsieve.store.PrefixStore, got {short(store)}; open one with PrefixStore(path)"
        )


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise InputError(f"the store cannot serve this prompt: {reason}; leave the store out")


def _plan_unserved(plan: Plan) -> str | None:
    if plan.shortens_prompt:
        return f"{plan.name} reads the whole conversation again in every turn"
    if plan.scores_entries:
        return f"{plan.name} scores entries by the queries after them, which a beginning of the prompt lacks"
    return f"{plan.name} chooses among the tokens of the whole prompt" if plan.drafts else None
