"""Clients that edit code at once, by servers with and without drafts: tokens per second, gaps between pieces of text.

    python benchmarks/speed/speculation_serve.py MODEL [--draft lookup] [--plan full] [--clients 4] [--length 4096]
        [--rounds 3] [--out FILE]

Two servers (`kvsieve serve`, one with --draft) have the model; one is stopped (SIGSTOP) while the other is measured, in
another order every round. The clients ask for functions of one source file (the task `edit` of copying.py), whose
beginning each server has prefilled before: each client sends its next request when its last one is answered. Tokens per
second are those of all answers, from the first request to the end of the last answer; gaps are those between pieces of
text of one answer, which may have several tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.speed.copying import documents
from benchmarks.speed.serve_against import Contender, free_port, started
from kvsieve.lab.client import Completed, ServerClient
from kvsieve.models import load_tokenizer
from kvsieve.report.environment import environment, write_result

WITHOUT = "without drafts"


def servers(arguments: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> list[Contender]:
    """Return both servers, started."""
    found = []
    for name, more in ((WITHOUT, []), (arguments.draft, ["--draft", arguments.draft])):
        port = free_port()
        command = [sys.executable, "-m", "kvsieve", "serve", str(arguments.model), "--port", str(port), *more]
        command += ["--method", arguments.plan, "--running", str(arguments.clients)]
        found.append(stack.enter_context(started(name, command, port, folder / f"{len(found)}.log", {})))
    return found


def measured(url: str, prompts: list[list[int]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return figures of one round of a server. prompts: questions about one document."""
    client = ServerClient(url)
    # What all prompts have in common is prefilled, and stored.
    client.complete(prompts[0], 1)

    def ask(number: int) -> list[Completed]:
        own = [prompts[(number + turn) % len(prompts)] for turn in range(arguments.requests)]
        return [client.complete(ids, arguments.new_tokens) for ids in own]

    with ThreadPoolExecutor(arguments.clients) as pool:
        answers = [answer for own in pool.map(ask, range(arguments.clients)) for answer in own]
    client.close()
    seconds = max(answer.ended for answer in answers) - min(answer.began for answer in answers)
    drafted = [(answer.kept or {}).get("drafted") or {} for answer in answers]
    gaps = [after - before for answer in answers for before, after in itertools.pairwise(answer.times)]
    return {
        "tokens_per_s": round(sum(answer.new_tokens for answer in answers) / seconds, 2),
        "gap_p95_s": round(statistics.quantiles(gaps, n=20)[-1], 4),
        "gap_median_s": round(statistics.median(gaps), 4),
        "tokens": sum(answer.new_tokens for answer in answers),
        "drafted": sum(counts.get("tokens", 0) for counts in drafted),
        "accepted": sum(counts.get("accepted", 0) for counts in drafted),
    }


def summary(rounds: list[dict[str, dict[str, Any]]], draft: str) -> dict[str, float]:
    """Return medians over rounds of both servers' figures, and of their ratios within a round."""
    found = {}
    for name in ("tokens_per_s", "gap_p95_s", "gap_median_s"):
        for key, place in (("without", WITHOUT), ("with", draft)):
            found[f"{name}_{key}"] = round(statistics.median(each[place][name] for each in rounds), 4)
        found[f"{name}_ratio"] = round(statistics.median(each[draft][name] / each[WITHOUT][name] for each in rounds), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="a checkpoint's directory")
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--plan", default="full", help="of all requests, such as snapkv:budget=10%%")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2, help="of each client in a round (default: 2)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of prompt and answer")
    parser.add_argument("--new-tokens", type=int, default=192, help="most tokens of an answer (default: 192)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "drafts_serve.json")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(str(arguments.model))
    # A file of its own for every round: what a round has answered is not found again.
    texts = documents("code", tokenizer, arguments.length - arguments.new_tokens, arguments.rounds)
    rounds = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        both = servers(arguments, Path(folder), stack)
        for number, text in enumerate(texts):
            prompts = text.prompts(tokenizer, "edit")
            found = {}
            for one in both if number % 2 else both[::-1]:
                for other in both:
                    other.signal(signal.SIGCONT if other is one else signal.SIGSTOP)
                found[one.name] = measured(one.url, prompts, arguments)
            rounds.append(found)
            print(f"round {number + 1}: {found}", flush=True)
            report = {"environment": environment(arguments.model), "model": arguments.model.name}
            report |= {name: getattr(arguments, name) for name in ("draft", "plan", "clients", "requests", "length")}
            write_result(arguments.out, {**report, "summary": summary(rounds, arguments.draft), "rounds": rounds})
    print(summary(rounds, arguments.draft))


if __name__ == "__main__":
    main()
