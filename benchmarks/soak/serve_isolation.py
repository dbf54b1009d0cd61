"""Probes of one API key's prompts by another: does the time to the first token tell what was read for the first?

    python benchmarks/soak/serve_isolation.py [MODEL] [--tiny] [--pairs 60] [--tokens 256] [--store DIR] [--out FILE]

One key has documents read. Then the other one asks about these and about as many that nobody has asked for, in random
order, each once. Told are probes that found anything (there must be none; random documents have a token or two in
common), median times of both kinds, and how well the time tells them apart: the area under the ROC curve (0.5: not at
all; 1: always), with the share of random relabellings that tell them apart as well (a p-value). The first key's own
second questions, and the same with --share, show that the measurement would see a hit. Over HTTP, on an otherwise
idle machine; --tiny takes a random model, whose times say little.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import serve_tiny

import kvsieve
from kvsieve.report.environment import environment, write_result
from kvsieve.serve.keys import Keys
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application

# Tokens that two random documents never begin with alike.
_SOME = 8
KEYS = ("the-first-key", "the-second-key")


class Prober:
    """Asks a server for one token, and notes how long it takes and what was found."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._client = httpx.Client(timeout=600)

    def ask(self, key: str, ids: list[int]) -> tuple[float, int]:
        body = {"model": "tiny", "prompt": ids, "max_tokens": 1}
        began = time.perf_counter()
        reply = self._client.post(self._url, json=body, headers={"Authorization": f"Bearer {key}"})
        seconds = time.perf_counter() - began
        reply.raise_for_status()
        return seconds, reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def separation(first: list[float], second: list[float], draws: int = 2000) -> dict[str, float]:
    """Area under the ROC curve of `first` being quicker, and the share of relabellings as far from 0.5."""

    def area(one: list[float], other: list[float]) -> float:
        return statistics.mean((a < b) + 0.5 * (a == b) for a in one for b in other)

    found, draw = area(first, second), random.Random(1)
    both, extreme = [*first, *second], 0
    for _ in range(draws):
        draw.shuffle(both)
        extreme += abs(area(both[: len(first)], both[len(first) :]) - 0.5) >= abs(found - 0.5)
    return {"area": round(found, 3), "p": round((extreme + 1) / (draws + 1), 4)}


def probed(url: str, words: tuple[int, int], given: argparse.Namespace, key: str) -> dict[str, Any]:
    """Have documents read for the first key, and probe them, and others, by `key`."""
    draw, prober = random.Random(7), Prober(url)

    def document() -> list[int]:
        return [draw.randint(*words) for _ in range(given.tokens)]

    for _ in range(4):
        prober.ask(key, document())
    known, unknown = ([document() for _ in range(given.pairs)] for _ in range(2))
    for each in known:
        prober.ask(KEYS[0], each)
    order = [("known", each) for each in known] + [("unknown", each) for each in unknown]
    draw.shuffle(order)
    times: dict[str, list[float]] = {"known": [], "unknown": []}
    hits = 0
    for kind, each in order:
        seconds, found = prober.ask(key, each)
        times[kind].append(seconds)
        hits += kind == "known" and found >= _SOME
    return {
        "hits": hits,
        "known_s": round(statistics.median(times["known"]), 5),
        "unknown_s": round(statistics.median(times["unknown"]), 5),
        **separation(times["known"], times["unknown"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--store", help="a new directory for stores on the disk; memory alone if left out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "serve_isolation.json")
    given = parser.parse_args()
    loaded = None if given.tiny else kvsieve.models.load(given.model)
    results: dict[str, Any] = {}
    for name, key, share in (
        ("another key", KEYS[1], False),
        ("its own key", KEYS[0], False),
        ("shared", KEYS[1], True),
    ):
        limits = ServerLimits(kv_bytes=1 << 30)
        store = None if given.store is None else f"{given.store}-{name.replace(' ', '-')}"
        options = ServerOptions(keys=Keys(KEYS), limits=limits, share=share, store=store)
        with contextlib.ExitStack() as stack:
            if loaded is None:
                url, _ = stack.enter_context(serve_tiny.served(options))
                words = (3, 120)
            else:
                from served_apps import listening

                url = stack.enter_context(listening(stack.enter_context(application(*loaded, options, "tiny"))))
                words = (100, loaded[0].config.vocab_size - 100)
            results[name] = probed(url, words, given, key)
        print(f"{name}: {results[name]}", flush=True)
    report = {
        "environment": environment(),
        "model": "tiny" if given.tiny else given.model or "demo",
        "pairs": given.pairs,
        "tokens": given.tokens,
        "probes": results,
    }
    write_result(given.out, report)
    if results["another key"]["hits"]:
        raise SystemExit("one key has found what was read for another")


if __name__ == "__main__":
    main()
