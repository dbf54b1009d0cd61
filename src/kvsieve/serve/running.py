"""A prefilled request with its answers and costs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsieve.decoding.answer import Answer
from kvsieve.decoding.loop import Rows
from kvsieve.decoding.sampling import Sampler, processors_for
from kvsieve.detokenize import Detokenizer
from kvsieve.errors import KvsieveError
from kvsieve.hf.drafts.drafter import DraftCounts
from kvsieve.hf.generate.stats import stats_of
from kvsieve.hf.kept import kept_of
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.reread import logits_at_border
from kvsieve.planning.drafts import Draft
from kvsieve.serve.reading import PromptReader
from kvsieve.serve.ticket import DocumentCounts, Summary, Ticket


class Running:
    """A prefilled request and its answers, each with its first token.

    Attributes:
        ticket: the request.
        reading: its prefill.
        answers: all of them, including ended ones.
        rows: each answer with its cache.
        kept: map of kept entries; see Summary.
    """

    def __init__(self, ticket: Ticket, reading: PromptReader, logits: Tensor, tokenizer: Any) -> None:
        self.ticket = ticket
        self.reading = reading
        order = ticket.order
        cache = reading.cache
        self.kept: tuple[float, ...] = ()
        if order.bins:
            kept = kept_of(cache, torch.tensor([order.ids])).map(order.bins)
            self.kept = tuple(round(share, 4) for share in kept.mean(0).tolist())
        caches = [cache, *(cache.fork() for _ in range(order.answers - 1))]
        ids = torch.tensor(order.ids)
        ends = frozenset[int]() if order.ignore_eos else order.stop_ids
        self.rows: list[Rows] = []
        self._notes: list[str] = []
        for number, own in enumerate(caches):
            matcher = None if order.grammar is None else order.grammar.matcher(ends)
            processors = processors_for(reading.sieve.model, ids, order.sampling, order.max_tokens, ends, matcher)
            answer = Answer(
                Sampler(order.sampling, ids, processors, number),
                ends,
                order.max_tokens,
                words=Detokenizer(tokenizer, order.ids if order.continues else (), order.shown),
                tell=ticket.tell,
                stops=order.stops,
                number=number,
                matcher=matcher,
            )
            self.rows.append(Rows(reading.sieve, own, [answer], self._logits_again))
        self.answers = [answer for rows in self.rows for answer in rows.answers]
        for rows, answer in zip(self.rows, self.answers, strict=True):
            rows.take(logits[None, None])
            if order.draft is not None and rows.going:
                self._draft(order.draft, rows, [*order.ids, *answer.tokens])

    def _draft(self, draft: Draft, rows: Rows, tokens: list[int]) -> None:
        """Draft an answer, or note why its plan cannot be drafted for. tokens: of the conversation so far."""
        try:
            rows.open_drafts(draft, [tokens])
        except KvsieveError as error:
            self._notes.append(f"nothing was drafted: {error}")

    def _logits_again(self, rows: Rows) -> Tensor:
        """Prefill the prompt and the answer so far again; return logits [1, V]."""
        order = self.ticket.order
        tokens = rows.answers[0].tokens
        ids = torch.tensor([[*order.ids, *tokens]])
        options = ReadOptions(self.reading.chunk, order.max_tokens, constraints=order.constraints)
        return logits_at_border(self.reading.sieve, ids, rows.cache, options, len(tokens))

    @property
    def going(self) -> int:
        return sum(rows.going for rows in self.rows)

    def close(self) -> None:
        """Close the drafts of the answers."""
        for rows in self.rows:
            rows.close()

    def cut(self) -> None:
        for answer in self.answers:
            if answer.finish is None:
                answer.cut()

    def summary(self) -> Summary:
        ticket = self.ticket
        first = self.answers[0]
        now = time.perf_counter()
        stats = stats_of(self.reading.sieve, self.reading.cache, first.times, ticket.came, None)
        counts = DraftCounts()
        for answer in self.answers:
            counts.add(answer.drafts)
        ended = [drafts.note for rows in self.rows for drafts in rows.drafts if drafts.note is not None]
        notes = [*ticket.order.notes, *self.reading.notes, *stats.notes, *dict.fromkeys([*self._notes, *ended])]
        reasoning = ticket.order.reasoning
        joined = self.reading.joined
        return Summary(
            prompt_tokens=len(ticket.order.ids),
            cached_tokens=self.reading.cached,
            new_tokens=sum(len(answer.tokens) for answer in self.answers),
            stats=replace(stats, notes=notes, drafts=None if ticket.order.draft is None else counts),
            kept=self.kept,
            seconds=now - ticket.came,
            ttft_s=first.times[0] - ticket.came,
            queued_s=self.reading.queued,
            reasoning_tokens=None
            if reasoning is None
            else sum(reasoning.count(answer.tokens) for answer in self.answers),
            documents=None
            if joined is None
            else DocumentCounts(joined.kind, joined.found, joined.prefilled, joined.reread),
        )
