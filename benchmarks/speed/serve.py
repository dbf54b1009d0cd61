"""Clients of the scheduler side by side: tokens per second, and the gaps between tokens while a long prompt is read.

    python benchmarks/speed/serve.py [MODEL] [--clients 8] [--rounds 3] [--tokens 7500] [--gaps 2.25,inf] [--chunk 128]
        [--out FILE]

All in one process, without HTTP. In a round, one client and then several generate as many tokens each; reported is the
median over rounds of the ratio within a round. Then several streams run while a prompt of --tokens comes: the
95th percentiles of the gaps between tokens of the streams before it came and while it was read, how long reading it
took, and how long it takes with nothing beside it, for each --gap (`kvsieve serve --gap`; inf reads whole chunks).
"""

from __future__ import annotations

import argparse
import itertools
import queue
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import kvsieve
from kvsieve.devices import auto_dtype
from kvsieve.hf.attach import attached
from kvsieve.lab.tasks.haystack import load_haystack
from kvsieve.planning.plans import Plan
from kvsieve.report.environment import environment, write_result
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.ticket import Order, Summary, Ticket


class Client:
    """A request and the times of its events."""

    def __init__(self, scheduler: Scheduler, ids: torch.Tensor, plan: Plan, tokens: int) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.times: list[float] = []
        order = Order(tuple(ids.tolist()), plan, tokens, ignore_eos=True)
        self.ticket: Ticket = scheduler.submit(order, lambda event: self.events.put((time.perf_counter(), event)))

    def token(self) -> Any:
        """Wait for the next event."""
        at, event = self.events.get(timeout=600)
        if isinstance(event, Exception):
            raise event
        if not isinstance(event, Summary):
            self.times.append(at)
        return event

    def summary(self) -> Summary:
        """Wait for the end."""
        while not isinstance(event := self.token(), Summary):
            pass
        return event

    def drain(self) -> None:
        """Take in what has come."""
        while not self.events.empty():
            self.token()


def prompts(tokenizer: Any, length: int, count: int, seed: int) -> torch.Tensor:
    """Pieces of a text from places drawn by `seed`, so that answers are text as well, sent token by token."""
    text = torch.tensor(tokenizer(load_haystack("topics")).input_ids)
    starts = torch.randint(len(text) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[start : start + length] for start in starts])


def throughput(scheduler: Scheduler, plan: Plan, ids: torch.Tensor, tokens: int) -> float:
    """Tokens per second of all clients, from the first token of the last one to the first end."""
    clients = [Client(scheduler, each, plan, tokens) for each in ids]
    for client in clients:
        client.summary()
    # While all run: one chunk has the text of a token or more, so tokens are counted, not pieces.
    began, ended = max(client.times[0] for client in clients), min(client.times[-1] for client in clients)
    made = sum(sum(began < at <= ended for at in client.times) for client in clients)
    return made / (ended - began)


def gaps(clients: list[Client], since: float, until: float) -> list[float]:
    found = []
    for client in clients:
        times = [at for at in client.times if since <= at <= until]
        found += [after - before for before, after in itertools.pairwise(times)]
    return found


def reading(sieve: Any, tokenizer: Any, plan: Plan, gap: float, given: argparse.Namespace) -> dict[str, Any]:
    """Gaps of running streams before and while a long prompt is read."""
    scheduler = Scheduler(sieve, tokenizer, ServerLimits(chunk=given.chunk, gap=gap))
    scheduler.start()
    streams = [Client(scheduler, each, plan, 8000) for each in prompts(tokenizer, 200, given.streams, 5)]
    for client in streams:
        client.token()
    began = time.perf_counter()
    time.sleep(given.idle)
    for client in streams:
        client.drain()
    idle = gaps(streams, began, time.perf_counter())
    came = time.perf_counter()
    long = Client(scheduler, prompts(tokenizer, given.tokens, 1, 6)[0], plan, 2)
    long.token()
    read = time.perf_counter()
    for client in streams:
        client.drain()
        client.ticket.cancel()
    busy = gaps(streams, came, read)
    alone = Client(scheduler, prompts(tokenizer, given.tokens, 1, 7)[0], plan, 2)
    ttft = alone.summary().ttft_s
    scheduler.close()
    before, while_read = (statistics.quantiles(each, n=20)[-1] for each in (idle, busy))
    return {
        "gap": str(gap),
        "chunk": given.chunk,
        "idle_p95_s": round(before, 4),
        "reading_p95_s": round(while_read, 4),
        "ratio": round(while_read / before, 2),
        "reading_s": round(read - came, 2),
        "alone_s": round(ttft, 2),
        "gaps": [len(idle), len(busy)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=300, help="tokens of each client's prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--streams", type=int, default=4, help="answers that run while a prompt is read")
    parser.add_argument("--idle", type=float, default=4.0, help="seconds of the streams alone")
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--gaps", default="2.25,inf", help="empty for none")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--decode", default="auto")
    parser.add_argument("--methods", default="full,snapkv:budget=10%")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "serve.json")
    given = parser.parse_args()
    model, tokenizer = kvsieve.models.load(given.model)
    report: dict[str, Any] = {
        "environment": environment(),
        "model": given.model or "demo",
        "dtype": auto_dtype("cpu").name,
        "decode": given.decode,
        "clients": given.clients,
        "answer_tokens": given.answer,
        "methods": {},
    }
    with attached(model, Plan(), given.decode, tokenizer, any_plan=True) as sieve:
        for method in filter(None, given.methods.split(",")):
            name, _, budget = method.partition(":budget=")
            plan = kvsieve.plan(name, **({"budget": budget} if budget else {}))
            scheduler = Scheduler(sieve, tokenizer, ServerLimits(running=given.clients, chunk=128))
            scheduler.start()
            ids = prompts(tokenizer, given.prompt, given.clients, 1)
            throughput(scheduler, plan, ids[:2], 8)
            one, all_ = [], []
            for turn in range(given.rounds):
                one.append(throughput(scheduler, plan, ids[turn : turn + 1], given.answer))
                all_.append(throughput(scheduler, plan, ids, given.answer))
                print(f"{method}: one {one[-1]:.1f} tokens/s, {given.clients} together {all_[-1]:.1f}", flush=True)
            scheduler.close()
            ratio = statistics.median(b / a for a, b in zip(one, all_, strict=True))
            report["methods"][method] = {
                "one_tokens_s": round(statistics.median(one), 1),
                "all_tokens_s": round(statistics.median(all_), 1),
                "ratio": round(ratio, 2),
            }
        if given.gaps:
            plan = kvsieve.plan("full")
            report["reading"] = []
            for gap in map(float, given.gaps.split(",")):
                report["reading"].append(reading(sieve, tokenizer, plan, gap, given))
                print(report["reading"][-1], flush=True)
    write_result(given.out, report)


if __name__ == "__main__":
    main()
