"""Many requests to a server, valid, invalid and abandoned: nothing leaks, and answers are the library's.

    python benchmarks/serve_soak.py [--requests 10000] [--clients 8] [--out FILE]

The model is tiny and random, in float32; the server runs in this process and is asked over HTTP. Memory is what the
process has resident after the first tenth of the requests, and at the end. Every response of an error is looked at, and
every greedy answer is compared with `sieve.generate`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn

import kvsieve
from kvsieve.models.families import build
from kvsieve.report.environment import environment
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.run import ServerOptions, application

CHUNK = 32
METHODS = ("full", "snapkv:window=4:paper=True", "streamingllm")
INVALID: tuple[dict[str, Any], ...] = (
    {"prompt": []},
    {"prompt": [10**9]},
    {"best": 1},
    {"model": "other"},
    {"kv": {"method": "h2o"}},
    {"max_tokens": 10**6},
    {"temperature": -1},
    {"prompt": [5] * 600},
)


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def words(draw: random.Random) -> list[int]:
    return [draw.randint(3, 120) for _ in range(draw.randint(1, 120))]


class Soak:
    """Requests of one kind after another, each drawn by its number."""

    def __init__(self, url: str, prompts: list[list[int]]) -> None:
        self.url, self.prompts, self.counts = url, prompts, Counter[str]()
        self.answers: list[tuple[int, str, list[int]]] = []
        self.client = httpx.Client(timeout=120)

    def one(self, number: int) -> None:
        draw = random.Random(number)
        at, method = draw.randrange(len(self.prompts)), draw.choice(METHODS)
        budget = {} if method == "full" else {"budget": 24}
        body: dict[str, Any] = {"model": "tiny", "prompt": self.prompts[at], "max_tokens": 6, "ignore_eos": True}
        body |= {"kv": {"method": method, **budget}}
        kind = draw.choices(("valid", "stream", "invalid", "abandoned"), (5, 2, 2, 1))[0]
        path = f"{self.url}/v1/completions"
        if kind == "invalid":
            reply = self.client.post(path, json={**body, **draw.choice(INVALID)})
            assert 400 <= reply.status_code < 500 and reply.json()["error"]["message"], reply.text
        elif kind == "valid":
            reply = self.client.post(path, json={**body, "logprobs": 0})
            if reply.status_code != 429:
                assert reply.status_code == 200, reply.text
                choice = reply.json()["choices"][0]
                self.answers.append((at, method, choice["logprobs"]["tokens"]))
        else:
            with self.client.stream("POST", path, json={**body, "stream": True}) as stream:
                lines = [next(stream.iter_lines())] if kind == "abandoned" else [*stream.iter_lines()]
            assert kind == "abandoned" or [line for line in lines if line][-1] == "data: [DONE]", lines[-3:]
        self.counts[kind] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "serve_soak.json")
    given = parser.parse_args()
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
    from toy_chats import chat_tokenizer

    draw, tokenizer = random.Random(0), chat_tokenizer()
    prompts = [words(draw) for _ in range(24)]
    limits = ServerLimits(chunk=CHUNK, max_tokens=64, kv_bytes=1 << 28)
    options = ServerOptions(others=METHODS, limits=limits, store_memory="16MiB")
    with application(build("llama"), tokenizer, options, "tiny") as app:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        soak = Soak(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", prompts)
        began, tenth = time.perf_counter(), max(given.requests // 10, 1)
        with ThreadPoolExecutor(given.clients) as pool:
            list(pool.map(soak.one, range(tenth)))
            before = resident()
            list(pool.map(soak.one, range(tenth, given.requests)))
        seconds = time.perf_counter() - began
        scheduler = app.state.service.scheduler
        deadline = time.monotonic() + 60
        while scheduler.state()["kv_bytes"] and time.monotonic() < deadline:
            time.sleep(0.05)
        state, after = scheduler.state(), resident()
        server.should_exit = True
        thread.join()
    wrong = compared(soak.answers, prompts, tokenizer)
    report = {
        "environment": environment(),
        "requests": given.requests,
        "kinds": dict(soak.counts),
        "seconds": round(seconds, 1),
        "answers_compared": len(soak.answers),
        "answers_wrong": wrong,
        "resident_before": before,
        "resident_after": after,
        "growth": round(after / before - 1, 4),
        "left_over": state,
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in report if key != "environment"}, indent=1))


def compared(answers: list[tuple[int, str, list[str]]], prompts: list[list[int]], tokenizer: Any) -> int:
    """How many answers are not the library's."""
    wrong, twin = 0, build("llama")
    for method in METHODS:
        name, _, rest = method.partition(":")
        given: dict[str, Any] = {} if name == "full" else {"budget": 24}
        given |= {"window": 4, "paper": True} if rest else {}
        right = {}
        with contextlib.ExitStack() as stack:
            sieve = stack.enter_context(kvsieve.attach(twin, kvsieve.plan(name, **given)))
            for at in {at for at, asked, _ in answers if asked == method}:
                ids = torch.tensor([prompts[at]])
                out = sieve.generate(ids, chunk=CHUNK, max_new_tokens=6, do_sample=False, eos_token_id=None)
                right[at] = [tokenizer.decode([token]) for token in out.sequences[0, ids.shape[1] :].tolist()]
        wrong += sum(tokens != right[at] for at, asked, tokens in answers if asked == method)
    return wrong


if __name__ == "__main__":
    main()
