"""Random conversations through a prefix store: each answer equals the one given without a store.

    python tests/support/fuzz_store.py [--traces 1000] [--seed 0] [--only NUMBER ...]

A trace is a family, a plan (each method, with and without codecs and views), a chunk length and some requests: fresh
prompts, prompts asked again, beginnings with another end, conversations that go on. It goes one of four ways:

- library: `StoredPrefixes.generate`, as `kvsieve run` and a chat's first turn do; expected: `sieve.generate` anew
- server: the scheduler without a session, two requests at once; expected: the same
- session: the scheduler with one; expected: the same turns on one cache
- turns: `PrefixStore.find(turns=)` in conversations with answers; expected: the turns read anew

A trace is drawn by its number; the script exits 1 where one differs, and `--only` runs it again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import queue
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import logging

import kvsieve
from kvsieve import Plan, methods
from kvsieve.decoding.asked import AnswerPart, Sampling
from kvsieve.errors import KvsieveError, PlanError
from kvsieve.hf import reuse
from kvsieve.hf.attach import attached
from kvsieve.hf.reuse import StoredPrefixes, unserved
from kvsieve.hf.sieve import Sieve
from kvsieve.planning.registry import list_methods
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.prefixes import ServerPrefixes
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.ticket import Order
from kvsieve.store import PrefixStore
from small import plan_of
from tiny_models import build
from toy_words import word_tokenizer

FAMILIES = ("llama", "llama", "gemma3_text", "lfm2", "qwen3_next", "deepseek_v3")
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
CODECS = (
    methods.KIVI(bits=4, block=8, group=8, tail=4),
    methods.Rotated(bits=3, block=16, tail=8),
)
Ids = tuple[int, ...]


@dataclasses.dataclass
class Trace:
    """A trace and what has come of it.

    Attributes:
        draw: chooses.
        sieve: the model under the plan, for the expected answers and the library.
        chunk: tokens per pass.
        counts: answers compared, and those whose beginning came from the store.
        known: conversations so far, with their answers.
        different: the requests whose answers differ, in words.
    """

    draw: random.Random
    sieve: Sieve
    chunk: int
    counts: collections.Counter[str]
    known: list[Ids] = dataclasses.field(default_factory=list)
    different: list[str] = dataclasses.field(default_factory=list)

    def tokens(self, least: int, most: int) -> Ids:
        return tuple(self.draw.randrange(3, 120) for _ in range(self.draw.randint(least, most)))

    def prompt(self) -> Ids:
        """Return the next request's prompt: fresh, known, of a known beginning, or one that goes on."""
        if not self.known or self.draw.random() < 0.15:
            return self.tokens(20, 110)
        before = self.draw.choice(self.known)[:160]
        kind = self.draw.random()
        if kind < 0.1:
            return before
        if kind < 0.5:
            before = before[: self.draw.randint(1, len(before))]
        return before + self.tokens(1, self.draw.choice((2, 6, 40)))

    def compare(self, ids: Ids, got: Ids, expected: Ids, cached: int) -> None:
        self.counts["answers"] += 1
        self.counts["found"] += cached > 0
        self.counts["tokens"] += len(ids)
        self.counts["tokens found"] += cached
        self.known.append(ids + expected)
        if got != expected:
            self.different.append(f"{len(ids)} tokens, {cached} from the store: {got} is not {expected}")


def row(ids: Ids) -> torch.Tensor:
    return torch.tensor([ids])


def answered(trace: Trace, ids: Ids, cache: Any, new: int) -> Ids:
    """Return the tokens that the library answers on a cache."""
    # The token of padding may be one of an answer's.
    mask, options = torch.ones_like(row(ids)), {"chunk": trace.chunk, "max_new_tokens": new, **GREEDY}
    result = trace.sieve.generate(row(ids), mask, cache=cache, **options)
    return tuple(result.sequences[0, len(ids) :].tolist())


def library(trace: Trace, store: PrefixStore) -> None:
    stored, sieve, options = StoredPrefixes(store), trace.sieve, {"chunk": trace.chunk, **GREEDY}
    for _ in range(trace.draw.randint(3, 6)):
        ids, new = trace.prompt(), trace.draw.randint(1, 6)
        if unserved(sieve, options) is not None:
            return
        before = store.stats().tokens_reused
        result = stored.generate(sieve, row(ids), max_new_tokens=new, **options)
        got = tuple(result.sequences[0, len(ids) :].tolist())
        trace.compare(ids, got, answered(trace, ids, sieve.new_cache(), new), store.stats().tokens_reused - before)


@contextlib.contextmanager
def serving(trace: Trace, store: PrefixStore) -> Iterator[Callable[..., Callable[[], tuple[Ids, int]]]]:
    """Yield a function that sends a request to a scheduler and returns one that waits for its answer."""
    with attached(twin(trace.sieve.model.config.model_type), Plan(), "eager", any_plan=True) as many:
        scheduler = Scheduler(many, word_tokenizer(), ServerLimits(chunk=trace.chunk), ServerPrefixes(store, False))
        scheduler.start()

        def send(ids: Ids, new: int, session: str | None = None) -> Callable[[], tuple[Ids, int]]:
            events: queue.SimpleQueue[Any] = queue.SimpleQueue()
            plan = trace.sieve.plan
            scheduler.submit(
                Order(ids, plan, new, sampling=Sampling(logprobs=0), session=session, ignore_eos=True), events.put
            )

            def wait() -> tuple[Ids, int]:
                got: list[int] = []
                while isinstance(event := events.get(timeout=300), AnswerPart):
                    got += [each.own.id for each in event.tokens]
                if isinstance(event, Exception):
                    raise event
                return tuple(got), event.cached_tokens

            return wait

        try:
            yield send
        finally:
            scheduler.close()


def server(trace: Trace, store: PrefixStore) -> None:
    with serving(trace, store) as send:
        for _ in range(trace.draw.randint(2, 3)):
            asked = [(trace.prompt(), trace.draw.randint(1, 6)) for _ in range(trace.draw.randint(1, 2))]
            waiting = [send(*each) for each in asked]
            for (ids, new), wait in zip(asked, waiting, strict=True):
                got, cached = wait()
                trace.compare(ids, got, answered(trace, ids, trace.sieve.new_cache(), new), cached)


def session(trace: Trace, store: PrefixStore) -> None:
    cache, ids = trace.sieve.new_cache(), trace.tokens(20, 90)
    with serving(trace, store) as send:
        for turn in range(trace.draw.randint(2, 4)):
            if turn and trace.draw.random() < 0.3:
                other = trace.prompt()
                got, cached = send(other, 2)()
                trace.compare(other, got, answered(trace, other, trace.sieve.new_cache(), 2), cached)
            new = trace.draw.randint(1, 6)
            got, cached = send(ids, new, "one")()
            trace.compare(ids, got, answered(trace, ids, cache, new), cached)
            ids = trace.known[-1] + trace.tokens(1, trace.draw.choice((2, 6, 40)))


def turns(trace: Trace, store: PrefixStore) -> None:
    sieve, draw, chunk = trace.sieve, trace.draw, trace.chunk
    cache, ids, ends = sieve.new_cache(), trace.tokens(20, 60), list[int]()
    if sieve.plan.shortens_prompt:
        return
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.5:
            at = cache.num_seen + draw.randint(0, 3) * chunk
            if cache.num_seen < at <= len(ids) - max(2, sieve.plan.queries(len(ids))):
                sieve.begin(row(ids[:at]), cache=cache, chunk=chunk)
                store.add(sieve, ids, cache, 1.0, chunk=chunk)
        ends.append(len(ids))
        if draw.random() < 0.6:
            ids += answered(trace, ids, cache, draw.randint(1, 12))
        else:
            sieve.prefill(row(ids), torch.ones_like(row(ids)), cache=cache, chunk=chunk)
        store.add(sieve, ids, cache, 1.0, turns=ends, chunk=chunk)
        ids += trace.tokens(1, draw.choice((3, 40)))
    trace.known = [ids]
    for _ in range(draw.randint(2, 4)):
        asked = trace.prompt() if draw.random() < 0.6 else trace.known[0]
        borders = [end for end in ends if end < len(asked) - 1 and draw.random() < 0.8]
        if draw.random() < 0.2:
            borders = sorted({*borders, draw.randint(1, len(asked) - 1)})
        borders.append(len(asked))
        found = store.find(sieve, asked, turns=borders, chunk=chunk)
        expected = in_turns(trace, asked, borders, sieve.new_cache())
        got = expected if found is None else in_turns(trace, asked, borders, found.cache)
        trace.compare(asked, got, expected, 0 if found is None else found.tokens)
        del trace.known[1:]


def in_turns(trace: Trace, ids: Ids, ends: list[int], cache: Any) -> Ids:
    """Return the answer to a conversation whose prompts end so, on what a cache has read of it."""
    for end in ends[:-1]:
        if end > cache.num_seen:
            trace.sieve.prefill(row(ids[:end]), torch.ones_like(row(ids[:end])), cache=cache, chunk=trace.chunk)
    return answered(trace, ids, cache, 5)


WAYS: dict[str, Callable[[Trace, PrefixStore], None]] = {
    "library": library,
    "server": server,
    "session": session,
    "turns": turns,
}


@functools.cache
def twin(family: str, number: int = 1) -> Any:
    """Return a model of a family; those of another number are the same one again, for another plan."""
    return build(family, dtype=torch.float64, max_position_embeddings=1024)


def plan_drawn(draw: random.Random, model: Any, number: int) -> Plan:
    """Return a method's plan, every other one with a codec, a codec of the rest, or as a view."""
    plan = plan_of(list_methods()[number % len(list_methods())], model)
    kind = draw.choice(("method", "method", "method", "codec", "rest", "view"))
    changes: dict[str, Any] = {"codec": draw.choice(CODECS)} if kind == "codec" else {}
    if kind == "rest":
        changes = {"rest": draw.choice(CODECS)}
    if kind == "view":
        changes = {"evict": methods.PerTurn(base=methods.SnapKV(budget=30, window=8, kernel=3)), "propagate": None}
    with contextlib.suppress(PlanError):
        return dataclasses.replace(plan, **changes, unset=None, profile=None) if changes else plan
    return plan


def run(number: int, seed: int, counts: collections.Counter[str]) -> list[str]:
    """Run one trace and return what differed, in words."""
    draw = random.Random(f"{seed}/{number}")
    family, way = draw.choice(FAMILIES), draw.choice(list(WAYS))
    model, chunk = twin(family, 0), draw.choice((8, 16, 32))
    plan = plan_drawn(draw, model, number)
    if plan.drafts:
        # The store takes none of what they read, and the scheduler has no draft model.
        way = "library"
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory()) if draw.random() < 0.15 else None
        store = stack.enter_context(PrefixStore(path, memory=0 if path and draw.random() < 0.5 else "1GiB"))
        try:
            sieve = stack.enter_context(kvsieve.attach(model, plan))
            trace = Trace(draw, sieve, chunk, counts)
            answered(trace, (5,) * 40, sieve.new_cache(), 2)
        except KvsieveError:
            # The plan, or the family under it, is refused.
            counts["refused"] += 1
            return []
        try:
            WAYS[way](trace, store)
        except Exception as error:
            trace.different.append(f"{type(error).__name__}: {error}")
    counts[way] += 1
    where = f"trace {number}: {way}, {family}, {plan!r}, chunk {chunk}"
    return [f"{where}\n    {each}" for each in trace.different]


def fuzz(traces: Iterable[int], seed: int) -> tuple[collections.Counter[str], list[str]]:
    """Return counts and what differed of some traces, with borders that short prompts have as well."""
    counts, different = collections.Counter[str](), []
    last, reuse.LAST = reuse.LAST, 16
    try:
        for number in traces:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                different += run(number, seed, counts)
    finally:
        reuse.LAST = last
    return counts, different


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of traces to run again")
    given = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    began = time.perf_counter()
    counts, different = collections.Counter[str](), list[str]()
    for part in [range(given.traces)] if given.only is None else [range(each, each + 1) for each in given.only]:
        more, found = fuzz(part, given.seed)
        counts, different = counts + more, different + found
    print("\n".join(different))
    ways = ", ".join(f"{counts[way]} {way}" for way in WAYS)
    print(
        f"fuzz_store: traces of seed {given.seed}: {ways}, {counts['refused']} refused; {counts['answers']} answers, "
        f"{counts['found']} with {counts['tokens found']} of all {counts['tokens']} prompt tokens from the store, "
        f"{len(different)} differ; {time.perf_counter() - began:.0f} s"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
