"""Join of documents: each is prefilled alone, moved to its place, and prefilled again in part."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.edits import EditRecord
from kvsieve.hf.cache.records import TurnRecord
from kvsieve.hf.edit.editor import of_evictor, why_not_rearranged
from kvsieve.hf.edit.moved import MovedEntries
from kvsieve.hf.edit.positions import why_not_moved
from kvsieve.hf.forward.fed_ids import needs_ids
from kvsieve.hf.forward.passes import closing
from kvsieve.hf.join.asked import choose_asked
from kvsieve.hf.join.blend import prefill_chosen, why_not_blended
from kvsieve.hf.join.documents import JoinReader, JoinTexts
from kvsieve.hf.join.parallel import record_parallel, why_not_parallel
from kvsieve.hf.join.shift import Shift
from kvsieve.hf.prompt.options import Progress
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.joins import AskedJoin, Join, ParallelJoin, SelectiveJoin, Span


@dataclass(frozen=True)
class Joined:
    """Documents in one cache.

    Attributes:
        ids: int64 [1, N], the tokens before the documents, and theirs in order.
        cache: to continue with ``torch.cat([ids, question], 1)``. Under a plan that acts on the question it is in the
            middle of a prompt, without the last tokens of the documents, which the plan observes with the question.
        kind: text form of the join, "link:tokens=32".
        found: tokens of the documents, each document once, that came from the store.
        prefilled: likewise, those that were prefilled alone.
        reused: tokens in the cache with these entries.
        reread: tokens in the cache that were prefilled in their places, after all that precedes them; of a join that
            chooses tokens, those that all layers prefilled.
        seconds: time of the join.
    """

    ids: Tensor
    cache: SieveCache
    kind: str
    found: int
    prefilled: int
    reused: int
    reread: int
    seconds: float


def why_not_joined(model: AttachedModel, kind: Join, before: int) -> str | None:
    """Return a clause why documents after `before` tokens cannot be joined by a kind under a model's plan, or None."""
    plan = model.plan
    if plan.shortens_prompt:
        return f"{plan.name} keeps a shorter prompt in their place"
    if plan.propagate is not None:
        return f"{plan.name} drops tokens between layers, chosen in the whole prompt"
    cache = model.new_cache()
    evictor = None if plan.evict is None else plan.evict.why_not_joined(before)
    reason = why_not_rearranged(plan, cache) or of_evictor(plan, evictor)
    if reason is None and isinstance(kind, ParallelJoin):
        return why_not_parallel(model)
    reason = reason or model.facts.why_missing(("rotary",), cache.sieve_layers) or why_not_moved(model)
    if reason is None and isinstance(kind, (SelectiveJoin, AskedJoin)):
        reason = why_not_blended(model)
    return reason


@dataclass
class Joining:
    """A join in progress.

    Attributes:
        sieve: the attached model.
        kind: of the join.
        texts: the documents.
        question: int64 [1, N], tokens after them; None unless the kind needs it.
        spans: columns to prefill again; of a join that chooses them, once it has.
        reader: of each document alone.
        progress: called with (tokens done, total tokens).
        seen: columns of the joined cache: under a plan that acts on the question all but those that it observes.
        found: tokens of the documents that came from the store so far.
        began: time of the start.
    """

    sieve: Any
    kind: Join
    texts: JoinTexts
    question: Tensor | None
    spans: list[Span]
    reader: JoinReader
    progress: Progress | None
    seen: int = 0
    found: int = 0
    began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        size = self.texts.ids.shape[1]
        whole = self.reader.ends or isinstance(self.kind, ParallelJoin)
        self.seen = size if whole else max(size - self.sieve.plan.queries(size), 0)
        self.spans = [(start, min(end, self.seen)) for start, end in self.spans if start < self.seen]

    @property
    def first(self) -> int:
        """Column after the first document, or of the end."""
        return min(self.texts.start + self.texts.sizes[0], self.seen)

    @property
    def in_order(self) -> bool:
        """True if all tokens after the first document are prefilled again, so that the whole is one plain prefill."""
        first = self.first
        spans = [(max(start, first), end) for start, end in self.spans if end > first]
        return self._again(spans) == self.seen - first

    def _again(self, spans: list[Span]) -> int:
        """Return the number of tokens that all layers prefill again: those of spans, or chosen ones."""
        if isinstance(self.kind, SelectiveJoin):
            return self.kind.chosen(self.sieve.num_layers, self.seen - self.first)
        if isinstance(self.kind, AskedJoin):
            return self.kind.most(self.texts.until(self.seen)[1:])
        return sum(end - start for start, end in spans)

    def run(self) -> Joined:
        """Return the joined documents. Raises UnsupportedOptionError for a plan or model that cannot join them."""
        if self.in_order:
            return self._in_order(self.first)
        reason = why_not_joined(self.sieve, self.kind, self.texts.start)
        if reason is not None:
            way_out = "generate on one prompt" if self.sieve.plan.shortens_prompt else "take the join 'full'"
            raise UnsupportedOptionError(f"documents cannot be joined: {reason}; {way_out}, or take another plan")
        return self._in_places()

    def _in_order(self, first: int) -> Joined:
        """Prefill everything in one prompt; first: columns up to the end of the first document."""
        cache = self.sieve.new_cache()
        known = 0
        if self.seen:
            cache, known = self.reader.prefill(self.texts.ids[:, : self.seen], self._note(self.seen, self.seen))
        cache.conversation.edits = EditRecord(alone=self.reader.ends)
        self.found = max(known - self.texts.start, 0)
        alone = max(first - max(known, self.texts.start), 0)
        return self._result(cache, alone, max(self.seen - max(known, first), 0))

    def _in_places(self) -> Joined:
        """Prefill every document alone, and move its entries."""
        start = self.texts.start
        again = self._again(self.spans)
        rotated = not isinstance(self.kind, ParallelJoin)
        documents = self.texts.alone(self.seen)
        done = start
        most = start + sum(ids.shape[1] - start for ids, _ in documents)
        parts: list[tuple[SieveCache, Tensor]] = []
        acted: list[Span] = []
        evicted: set[int] = set()
        self.reader.prefill_beginning(self.texts.before, start + min(self.texts.sizes))
        for ids, places in documents:
            size = ids.shape[1] - start
            cache, known = self.reader.prefill(
                ids, self._note(most + again, done + size, done - start, 0 if done == start else start)
            )
            self.found += max(known - start, 0)
            done += size
            evicted |= cache.turn.record.evicted
            for place in places:
                # The tokens before the documents are those of the first one.
                begin = start if place > start else 0
                move = place - start
                target = torch.arange(start + size) + move
                target[:begin] = -1
                target[target >= self.seen] = -1
                parts.append((cache, target))
                acted += [(max(first, begin) + move, last + move) for first, last in cache.conversation.acted]
        entries = MovedEntries.of(self.sieve, parts, torch.zeros(self.seen, dtype=torch.bool), rotated=rotated)
        # Their memory is for the passes that follow.
        parts.clear()
        cache = self.sieve.new_cache()
        with closing():
            self._fill(cache, entries, self._note(most + again, most + again, most))
        cache.conversation.acted = tuple(sorted(acted))
        cache.conversation.note_approximate([self.kind.spec])
        cache.conversation.edits = EditRecord.joined(self.first, self.seen, self.spans, self.reader.ends)
        cache.turn.record.evicted = evicted
        if isinstance(self.kind, AskedJoin):
            again = sum(end - start for start, end in self.spans)
        return self._result(cache, most - start - self.found, again)

    def _fill(self, cache: SieveCache, entries: MovedEntries, done: Callable[[int], None] | None) -> None:
        """Give a new cache the entries of all columns, and the records of a prefill."""
        conversation = cache.conversation
        conversation.batch = 1
        cache.begin_turn(self.seen, acts=False)
        ids = self.texts.ids[:, : self.seen]
        kind = self.kind
        feed = None
        if isinstance(kind, SelectiveJoin):
            chosen = functools.partial(prefill_chosen, self.sieve, cache, ids, entries.layers, kind, self.reader.chunk)

            def feed() -> None:
                self.spans = chosen()

        if isinstance(kind, ParallelJoin):
            entries.divide_keys(self.texts.start, self.seen, kind.temperature)
            record_parallel(cache, self.texts, kind)
        if isinstance(kind, AskedJoin):
            assert self.question is not None
            self.spans = choose_asked(self.sieve, cache, self.texts, self.question, entries, kind, self.seen)
        spans = [(self.first, self.seen)] if isinstance(kind, SelectiveJoin) else self.spans
        shift = Shift(self.sieve, self.texts, self.first, self.seen, spans, entries) if kind.shifts else None
        entries.prefill(self.sieve, cache, ids[0], spans, self.reader.chunk, done, feed)
        if shift is not None:
            shift.apply(entries)
        entries.finish(self.sieve, cache, self.seen)
        conversation.ids = ids.to(self.sieve.model.device) if needs_ids(self.sieve.plan) else None
        turn = cache.turn
        turn.acts = True
        turn.record = TurnRecord()
        if self.reader.ends:
            turn.reading = False
            turn.rearranged = True
            turn.record.prompt_tokens = self.seen
            turn.record.kept = {index: layer.store.entries for index, layer in cache.sieve_layers.items()}
            conversation.prompt_lengths = (self.seen,)

    def _result(self, cache: SieveCache, prefilled: int, reread: int) -> Joined:
        seconds = time.perf_counter() - self.began
        reused = self.seen - reread
        return Joined(self.texts.ids, cache, self.kind.spec, self.found, prefilled, reused, reread, seconds)

    def _note(self, total: int, most: int, move: int = 0, begin: int = 0) -> Callable[[int], None] | None:
        """Return a callback for the number of tokens done of a part.

        Args:
            total: tokens of the join.
            most: tokens of the join at the end of the part.
            move: added to the part's tokens.
            begin: first tokens of the part that are done before.
        """
        progress = self.progress
        return None if progress is None else lambda done: progress(min(max(done, begin) + move, most), total)
