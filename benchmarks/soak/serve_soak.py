"""Many requests to a server, valid, invalid and abandoned: nothing leaks, and answers are the library's.

    python benchmarks/soak/serve_soak.py [--requests 10000] [--first 0] [--clients 8] [--out FILE]

The model is tiny and random, in float32; the server runs in this process and is asked over HTTP. Requests are drawn
by their numbers, from --first on, so that a long soak can be run in pieces: each piece is added to the file, and the
sums of all are printed. Every answer, whole or streamed, is compared with `sieve.generate`'s, and every response with
the schema.

Memory is what the process has of its own (anonymous pages), at forty points of a piece at which nothing runs, after a
collection and after the allocator has given back what is free. Caches fill and the allocator settles in the first half,
which counts as warm-up. A leak continues: the slope is of the second half (the median of the slopes between all
pairs of points), as growth in 10,000 requests and as a share of all memory, and that of the number of Python objects.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import random
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import serve_tiny
import torch

import kvsieve
from kvsieve.detokenize import text_of
from kvsieve.planning.turns import render, token_ids
from kvsieve.report.environment import environment, write_result
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.reply_schema import ChatReply, CompletionReply, ErrorReply
from kvsieve.serve.run import ServerOptions
from tiny_models import build
from toy_chats import chat_tokenizer

CHUNK, POINTS = 32, 40
METHODS = {
    "full": {},
    "snapkv:window=4:paper=True": {"budget": 24, "window": 4, "paper": True},
    "streamingllm": {"budget": 24},
}
INVALID: tuple[dict[str, Any], ...] = (
    {"prompt": []},
    {"prompt": [10**9]},
    {"best": 1},
    {"model": "other"},
    {"kv": {"method": "h2o"}},
    {"max_tokens": 10**6},
    {"temperature": -1},
    {"prompt": [5] * 600},
    {"n": 2, "best_of": 3},
)


def own_memory() -> int:
    """Bytes of the process's own pages, after all that is free was given back."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell what memory a process has of its own")


class Expected:
    """Answers of the library, worked out before any memory is measured."""

    def __init__(self, tokenizer: Any, prompts: list[list[int]]) -> None:
        self.texts: dict[tuple[str, str, int], str] = {}
        twin = build("llama")
        for method, given in METHODS.items():
            with kvsieve.attach(twin, kvsieve.plan(method.partition(":")[0], **given)) as sieve:
                for at, prompt in enumerate(prompts):
                    said = " ".join(tokenizer.convert_ids_to_tokens(prompt))
                    chat = token_ids(tokenizer, render(tokenizer, [{"role": "user", "content": said}]))
                    for kind, each in (("completions", prompt), ("chat/completions", chat)):
                        ids = torch.tensor([each])
                        out = sieve.generate(ids, chunk=CHUNK, max_new_tokens=6, do_sample=False, eos_token_id=None)
                        # A completion goes on with the prompt's text, a chat's answer is a text of its own.
                        before = len(text_of(tokenizer, each)) if kind == "completions" else 0
                        begin = 0 if kind == "completions" else ids.shape[1]
                        made = out.sequences[0, begin:].tolist()
                        self.texts[kind, method, at] = text_of(tokenizer, made)[before:]


class Soak:
    """Requests of one kind after another, each drawn by its number."""

    def __init__(self, url: str, prompts: list[list[int]], said: list[str], expected: Expected) -> None:
        self.url, self.prompts, self.said, self.expected = url, prompts, said, expected
        self.counts, self.wrong = Counter[str](), list[int]()
        self.client = httpx.Client(timeout=300)

    def one(self, number: int) -> None:
        draw = random.Random(number)
        at, method = draw.randrange(len(self.prompts)), draw.choice(list(METHODS))
        kind = draw.choice(("completions", "chat/completions"))
        asked = {"budget": METHODS[method]["budget"]} if METHODS[method] else {}
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "ignore_eos": True, "kv": {"method": method, **asked}}
        if kind == "completions":
            body["prompt"] = self.prompts[at]
        else:
            body["messages"] = [{"role": "user", "content": self.said[at]}]
        what = draw.choices(("valid", "stream", "invalid", "abandoned"), (5, 2, 2, 1))[0]
        path = f"{self.url}/v1/{kind}"
        if what == "invalid":
            reply = self.client.post(f"{self.url}/v1/completions", json={**body, "prompt": [5], **draw.choice(INVALID)})
            assert 400 <= reply.status_code < 500, reply.text
            ErrorReply.model_validate(reply.json())
        elif what == "valid":
            reply = self.client.post(path, json=body)
            if reply.status_code == 429:
                assert int(reply.headers["retry-after"]) >= 1
                ErrorReply.model_validate(reply.json())
                what = "refused"
            else:
                form = CompletionReply if kind == "completions" else ChatReply
                choice = form.model_validate(reply.raise_for_status().json()).choices[0]
                self.compare(number, choice.text if kind == "completions" else choice.message.content, kind, method, at)
        else:
            with self.client.stream("POST", path, json={**body, "stream": True}) as stream:
                lines = [next(stream.iter_lines())] if what == "abandoned" else [*stream.iter_lines()]
            if what == "stream":
                chunks = [line.removeprefix("data: ") for line in lines if line]
                assert chunks.pop() == "[DONE]", lines[-3:]
                choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
                pieces = [each.get("text", each.get("delta", {}).get("content")) or "" for each in choices]
                self.compare(number, "".join(pieces), kind, method, at)
        self.counts[what] += 1

    def compare(self, number: int, text: str | None, kind: str, method: str, at: int) -> None:
        self.counts["compared"] += 1
        if text != self.expected.texts[kind, method, at]:
            self.wrong.append(number)


def slope(points: list[tuple[int, int]]) -> float:
    """The median of the slopes between all pairs of points."""
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2))


def quiet(scheduler: Any) -> dict[str, int]:
    """Wait until nothing runs; what is left over."""
    deadline = time.monotonic() + 60
    while scheduler.state()["kv_bytes"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return scheduler.state()


def soaked(given: argparse.Namespace) -> dict[str, Any]:
    """Run a piece."""
    draw, tokenizer = random.Random(0), chat_tokenizer()
    prompts = [[draw.randint(3, 120) for _ in range(draw.randint(1, 120))] for _ in range(24)]
    said = [" ".join(tokenizer.convert_ids_to_tokens(prompt)) for prompt in prompts]
    expected = Expected(tokenizer, prompts)
    limits = ServerLimits(chunk=CHUNK, max_tokens=64, kv_bytes=1 << 28)
    options = ServerOptions(others=tuple(METHODS), limits=limits, store_memory="16MiB")
    memory, objects = list[tuple[int, int]](), list[tuple[int, int]]()
    last, step = given.first + given.requests, max(given.requests // POINTS, 1)
    with serve_tiny.served(options) as (url, app), ThreadPoolExecutor(given.clients) as pool:
        soak, scheduler = Soak(url, prompts, said, expected), app.state.service.scheduler
        began = time.perf_counter()
        for start in range(given.first, last, step):
            list(pool.map(soak.one, range(start, min(start + step, last))))
            state = quiet(scheduler)
            memory.append((start + step - given.first, own_memory()))
            objects.append((start + step - given.first, len(gc.get_objects())))
        seconds = time.perf_counter() - began
    half = len(memory) // 2
    growth = 10_000 * slope(memory[half:])
    return {
        "environment": environment(),
        "first": given.first,
        "requests": given.requests,
        "kinds": dict(soak.counts),
        "seconds": round(seconds, 1),
        "wrong": soak.wrong,
        "left_over": state,
        "memory": memory,
        "warm_up_bytes": memory[half][1] - memory[0][1],
        "growth_per_10000_bytes": round(growth),
        "growth_per_10000": round(growth / memory[-1][1], 5),
        "objects": [objects[half], objects[-1]],
        "objects_per_10000": round(10_000 * slope(objects[half:]) / objects[-1][1], 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first; pieces before it are in the file")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "serve_soak.json")
    given = parser.parse_args()
    before = json.loads(given.out.read_text())["pieces"] if given.first else []
    pieces = [each for each in before if each["first"] + each["requests"] <= given.first] + [soaked(given)]
    report = {
        "requests": sum(each["requests"] for each in pieces),
        "compared": sum(each["kinds"]["compared"] for each in pieces),
        "wrong": sum(len(each["wrong"]) for each in pieces),
        "growth_per_10000": max(each["growth_per_10000"] for each in pieces),
        "objects_per_10000": max(each["objects_per_10000"] for each in pieces),
        "pieces": pieces,
    }
    write_result(given.out, report)
    print(json.dumps({**report, "pieces": [{**pieces[-1], "environment": None, "memory": None}]}, indent=1))


if __name__ == "__main__":
    main()
