"""A prefilled request with its answers and costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvsieve.detokenize import Detokenizer
from kvsieve.hf.generate.stats import stats_of
from kvsieve.hf.kept import kept_of
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.reread import crosses, logits_at_border
from kvsieve.hf.rows import feed_rows
from kvsieve.hf.sieve import Sieve
from kvsieve.serve.answer import Answer
from kvsieve.serve.reading import PromptReader
from kvsieve.serve.sampling import Sampler, processors_for
from kvsieve.serve.ticket import Summary, Ticket


class Running:
    """A prefilled request and its answers, each with its first token.

    Attributes:
        ticket: the request.
        reading: its prefill.
        answers: all of them, including ended ones.
        kept: map of kept entries; see Summary.
    """

    def __init__(self, ticket: Ticket, reading: PromptReader, logits: Tensor, tokenizer: Any) -> None:
        self.ticket, self.reading = ticket, reading
        order, cache = ticket.order, reading.cache
        self.kept: tuple[float, ...] = ()
        if order.bins:
            kept = kept_of(cache, torch.tensor([order.ids])).map(order.bins)
            self.kept = tuple(round(each, 4) for each in kept.mean(0).tolist())
        caches = [cache, *(cache.fork() for _ in range(order.answers - 1))]
        model, ids = reading.sieve.model, torch.tensor(order.ids)
        before = order.ids if order.continues else ()
        self.answers = []
        for number, own in enumerate(caches):
            sampler = Sampler(order.sampling, ids, processors_for(model, order), number)
            self.answers.append(Answer(number, order, own, sampler, Detokenizer(tokenizer, before), ticket.tell))
        for answer in self.answers:
            answer.add(logits)

    @property
    def going(self) -> int:
        """Answers in progress."""
        return sum(answer.finish is None for answer in self.answers)

    def cut(self) -> None:
        """End all answers at their current length."""
        for answer in self.answers:
            if answer.finish is None:
                answer.cut()

    def summary(self) -> Summary:
        """Return the costs of the ended request."""
        ticket, first, now = self.ticket, self.answers[0], time.perf_counter()
        stats = stats_of(self.reading.sieve, first.cache, first.times, ticket.came, None)
        return Summary(
            prompt_tokens=len(ticket.order.ids),
            cached_tokens=self.reading.cached,
            new_tokens=sum(len(answer.tokens) for answer in self.answers),
            stats=replace(stats, notes=[*ticket.order.notes, *self.reading.notes, *stats.notes]),
            kept=self.kept,
            seconds=now - ticket.came,
            ttft_s=first.times[0] - ticket.came,
        )


def next_logits(sieve: Sieve, part: Sequence[tuple[Running, Answer]]) -> Tensor:
    """Run a decode pass for some answers; return logits [B, V] on the CPU.

    Several share a pass, each under its own plan; a single one decodes as its plan says. If rotary tables change with
    the next token, a conversation is prefilled again, as in generate.
    """
    at_border = [crosses(sieve, answer.cache) for _, answer in part]
    others = [each for each, at in zip(part, at_border, strict=True) if not at]
    found = iter(_next_logits(sieve, others).split(1) if others else ())
    return torch.cat([_logits_again(*each) if at else next(found) for each, at in zip(part, at_border, strict=True)])


def _logits_again(running: Running, answer: Answer) -> Tensor:
    order, reading = running.ticket.order, running.reading
    ids = torch.tensor([[*order.ids, *answer.tokens]])
    options = ReadOptions(reading.chunk, order.max_tokens, constraints=order.constraints)
    return logits_at_border(reading.sieve, ids, answer.cache, options, len(answer.tokens)).cpu()


def _next_logits(sieve: Sieve, part: Sequence[tuple[Running, Answer]]) -> Tensor:
    ids = torch.tensor([answer.tokens[-1] for _, answer in part])
    if len(part) > 1:
        return feed_rows(sieve, [answer.cache for _, answer in part], ids).cpu()
    running, answer = part[0]
    found = running.reading.sieve.feed(answer.cache, ids[None], None, logits=1).logits
    assert found is not None
    return found[:, -1].cpu()
