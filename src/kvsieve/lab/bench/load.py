"""Time to the first token, time per token and throughput of an OpenAI-compatible server under load."""

from __future__ import annotations

import itertools
import random
import secrets
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from kvsieve.lab.client import Completed, ServerClient, ServerError

_LONGER = {"ignore_eos": True}
# Tokens of each prompt, or the fewest and the most of a mixture.
Length = int | tuple[int, int]


class LoadTest:
    """Clients of a server, each with one request at a time, without pauses.

    Every prompt is another part of a text, so that no prefix of it is cached.

    Args:
        client: of the server.
        text: int64 [1, M], tokens to make prompts of.
        new_tokens: of each answer.
        start: where the first prompt begins in the text; None for a random place, since a server may have cached the
            beginning in an earlier run.
        again: repeat a client's prompts, to measure the prefix cache. Default True.
    """

    def __init__(
        self, client: ServerClient, text: Tensor, new_tokens: int, start: int | None = None, *, again: bool = True
    ) -> None:
        self.client = client
        self.new_tokens = new_tokens
        self.again = again
        self._text: list[int] = text[0].tolist()
        self.start = secrets.randbelow(len(self._text)) if start is None else start
        self._at = self.start
        self.notes: list[str] = []
        self._more: dict[str, Any] = dict(_LONGER)
        self._lock = threading.Lock()

    def prompt(self, length: int) -> list[int]:
        with self._lock:
            at = self._at
            self._at = self._at + length
        return list(itertools.islice(self._endless(at), length))

    def _endless(self, at: int) -> Iterator[int]:
        at %= len(self._text)
        return itertools.chain(self._text[at:], itertools.cycle(self._text))

    def ask(self, prompt: Sequence[int]) -> Completed:
        try:
            return self.client.complete(prompt, self.new_tokens, **self._more)
        except ServerError as error:
            if error.status != 400 or "ignore_eos" not in str(error):
                raise
            self._more = {}
            self.notes.append("the server knows no ignore_eos, so answers end where the model ends them")
            return self.client.complete(prompt, self.new_tokens)

    def run(self, length: Length, clients: int, rounds: int) -> dict[str, Any]:
        """Measure `clients` at once, each with `rounds` requests; JSON-ready."""
        sizes = iter(_sizes(length, clients * rounds))
        prompts = [[self.prompt(next(sizes)) for _ in range(rounds)] for _ in range(clients)]
        ready = threading.Barrier(clients)

        def one(row: list[list[int]]) -> list[Completed]:
            ready.wait()
            return [self.ask(prompt) for prompt in row]

        with ThreadPoolExecutor(clients) as pool:
            found = [answer for answers in pool.map(one, prompts) for answer in answers]
        out = {"clients": clients, "requests": len(found), **_summary(found)}
        if clients == 1 and self.again:
            again = [self.ask(prompt) for prompt in prompts[0]]
            out["again"] = {
                "ttft_s": _spread([answer.ttft_s for answer in again]),
                "cached_tokens": _middle([answer.cached_tokens for answer in again]),
            }
        return out


def load_test(
    test: LoadTest,
    lengths: Sequence[Length],
    clients: Sequence[int],
    rounds: int,
    progress: Callable[[str], None],
    warm: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Measure a server at each length and number of clients, after one warm-up request; JSON-ready.

    Args:
        test: clients of the server.
        lengths: tokens per prompt, or the fewest and the most: they are spread evenly, in a fixed order.
        clients: numbers of clients.
        rounds: requests per client.
        progress: called with the next measurement.
        warm: tokens of the warm-up request; None for the most of those measured.
    """
    found: dict[str, Any] = {}
    for length in lengths:
        name = str(length) if isinstance(length, int) else "-".join(map(str, length))
        test.ask(test.prompt(warm or max(_sizes(length, 2))))
        found[name] = []
        for count in clients:
            progress(f"{name} tokens, {count} client{'s' if count > 1 else ''}")
            found[name].append(test.run(length, count, rounds))
            yield found


def _sizes(length: Length, count: int) -> list[int]:
    if isinstance(length, int):
        return [length] * count
    fewest, most = length
    sizes = [fewest + (most - fewest) * number // max(count - 1, 1) for number in range(count)]
    random.Random(0).shuffle(sizes)
    return sizes


def _summary(found: Sequence[Completed]) -> dict[str, Any]:
    seconds = max(answer.ended for answer in found) - min(answer.began for answer in found)
    tokens = sum(answer.new_tokens for answer in found)
    return {
        "seconds": round(seconds, 5),
        "new_tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 2),
        "requests_per_s": round(len(found) / seconds, 4),
        "ttft_s": _spread([answer.ttft_s for answer in found]),
        "tpot_s": _spread([answer.tpot_s for answer in found if answer.tpot_s is not None]),
        "prompt_tokens": _middle([answer.prompt_tokens for answer in found]),
        "cached_tokens": _middle([answer.cached_tokens for answer in found]),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    high = statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    return {"median": round(statistics.median(values), 5), "p95": round(high, 5)}


def _middle(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
