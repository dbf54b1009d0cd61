"""Time per token of sparse reading where layers share a choice, and the choice's part of it, paired round by round.

    python benchmarks/speed/shared_choice.py [--model DIRECTORY] [--length 32000] [--plan rocketkv:budget=512]
        [--share 1,4] [--attention] [--out FILE]

As reading_cost.py, the cache of every plan is filled with random entries up to the last tokens, and plans take turns,
`--tokens` tokens at a time, in one process. Besides the numbers of `--share` the plan is run with one choice for all
layers. Differences of times are taken within a round, and their medians are used: a choice takes
(T(every) - T(single)) / (layers - 1), and all choices of a plan T(plan) - T(single) plus one choice. They are given in
milliseconds and over those of a choice in every layer. `dense` is full KV beside it.

A choice may be a small part of a token, less than the spread of its time. With `--attention` layers run one by one, and
only the time inside attention, choices included, is counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reading_cost import LAST, Contender, against, loaded, rounds, spec

import kvsieve
from kvsieve.hf.forward import sparse_read
from kvsieve.lab.bench.prompts import text_ids
from kvsieve.report.environment import environment, write_result

Times = dict[str, list[tuple[float, float]]]


def shared(plan: kvsieve.Plan, share: int) -> kvsieve.Plan:
    """Return the plan with so many layers to a choice."""
    return dataclasses.replace(plan, read=dataclasses.replace(plan.read, share=share))  # type: ignore[type-var]


def parts(times: Times, every: str, single: str, layers: int, names: list[str]) -> dict[str, Any]:
    """Return the milliseconds of all choices of each plan and their ratios to a choice in every layer."""

    def over_single(name: str, at: int) -> float:
        return 1e3 * statistics.median(own[at] - one[at] for own, one in zip(times[name], times[single], strict=True))

    found: dict[str, Any] = {}
    for name in names:
        spent, ratios = [], []
        for at in (0, 1):
            choice = over_single(every, at) / (layers - 1)
            spent.append(round(over_single(name, at) + choice, 3))
            ratios.append(round((over_single(name, at) + choice) / (layers * choice), 3))
        found[name] = {"milliseconds": spent, "over a choice in every layer": ratios}
    return found


class AttentionClock:
    """Counts the seconds of the calls of sparse and dense attention of single tokens."""

    def __init__(self) -> None:
        self.spent = [0.0, 0.0]
        self._attend = sparse_read.attend
        sparse_read.attend = self._timed

    def _timed(self, request: Any) -> Any:
        began = time.perf_counter(), time.process_time()
        out = self._attend(request)
        self.spent[0] += time.perf_counter() - began[0]
        self.spent[1] += time.process_time() - began[1]
        return out

    def run(self, each: Contender, tokens: int) -> tuple[float, float]:
        """Seconds per token, of the clock and of the processor."""
        before = list(self.spent)
        each.run(tokens)
        return tuple((now - then) / (tokens + 1) for now, then in zip(self.spent, before, strict=True))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a checkpoint's directory; the demo model where it is left out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--plan", default="rocketkv:budget=512", help="a method that reads, without share=")
    parser.add_argument("--share", default="1,4", help="layers that share a choice, separated by commas")
    parser.add_argument("--decode", default="fused")
    parser.add_argument("--attention", action="store_true", help="count only the time inside attention")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=6, help="of a round")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model, tokenizer = loaded(arguments.model, arguments.dtype)
    layers = model.config.num_hidden_layers
    ids = text_ids(tokenizer)[:, : 2 * LAST].expand(arguments.batch, -1)
    new = (arguments.rounds + 1) * (arguments.tokens + 1)
    joint = "," if ":" in arguments.plan else ":"
    shares = sorted({1, *(int(share) for share in arguments.share.split(","))})
    names = {share: f"{arguments.plan}{joint}share={share}" for share in (*shares, layers)}
    plans = {name: shared(spec(arguments.plan), share) for share, name in names.items()}
    plans["dense"] = spec("full")
    contenders = {
        name: Contender(model, plan, "eager" if arguments.attention else arguments.decode, ids, arguments.length, new)
        for name, plan in plans.items()
    }
    clock = AttentionClock() if arguments.attention else None
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        name: (lambda each=each: each.run(arguments.tokens) if clock is None else clock.run(each, arguments.tokens))
        for name, each in contenders.items()
    }
    times = rounds(runs, arguments.rounds)
    reads = {name: each.cache.turn.record.reads for name, each in contenders.items() if name != "dense"}
    report = {
        "environment": environment(model),
        "model": Path(arguments.model).name if arguments.model else "demo",
        "dtype": arguments.dtype,
        "length": arguments.length,
        "batch": arguments.batch,
        "layers": layers,
        "numbers": f"of {'attention' if clock else 'a token'}: of the clock, and of the processor's time",
        "milliseconds": {
            name: [round(1e3 * statistics.median(one[at] for one in each), 3) for at in (0, 1)]
            for name, each in times.items()
        },
        "choices": parts(times, names[1], names[layers], layers, [names[share] for share in shares]),
        "over a choice in every layer": against(times, names[1]),
        "sparse reading": {name: one.not_compiled or "compiled" for name, one in reads.items()},
        "bytes of estimates per token": {name: round(one.estimate_bytes / one.tokens) for name, one in reads.items()},
    }
    print(json.dumps(report, indent=1))
    if arguments.out:
        write_result(arguments.out, report)


if __name__ == "__main__":
    main()
