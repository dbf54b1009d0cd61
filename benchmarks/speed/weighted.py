"""Time per token over entries with weights beside as many plain ones, in turns.

    python benchmarks/speed/weighted.py [--model DIRECTORY] [--dtype bfloat16] [--length 7500] [--rounds 7] [--out FILE]

Caches are filled with random entries, as in reading_cost.py. One of them gets a weight for every entry, which attention
adds to its logit. Ratios are taken within a round; medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reading_cost import LAST, Contender, against, loaded, rounds, spec

from kvsieve.cache import keep
from kvsieve.lab.bench.prompts import text_ids
from kvsieve.report.environment import environment, write_result
from kvsieve.types import Selection


def weigh(cache: Any, room: int) -> None:
    """Give all stored entries a weight; room: tokens that follow."""
    for layer in cache.sieve_layers.values():
        index = layer.store.index
        slots = torch.arange(index.shape[2]).expand(index.shape)
        layer.store = keep(layer.store, Selection(slots, log_weight=torch.rand(index.shape)), room)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a checkpoint's directory; the demo model where it is left out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=7500)
    parser.add_argument("--plan", default="full", help="such as adakv:budget=10%% for heads of different numbers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=6, help="of a round")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model, tokenizer = loaded(arguments.model, arguments.dtype)
    ids = text_ids(tokenizer)[:, : 2 * LAST]
    new = (arguments.rounds + 1) * (arguments.tokens + 1)
    contenders = {
        name: Contender(model, spec(arguments.plan), "fused", ids, arguments.length, new)
        for name in ("plain", "weighted")
    }
    weigh(contenders["weighted"].cache, new)
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        name: (lambda each=each: each.run(arguments.tokens)) for name, each in contenders.items()
    }
    times = rounds(runs, arguments.rounds)
    report = {
        "environment": environment(model),
        "model": Path(arguments.model).name if arguments.model else "demo",
        "dtype": arguments.dtype,
        "length": arguments.length,
        "plan": arguments.plan,
        "executors": contenders["weighted"].cache.turn.record.reads.executors[0],
        "milliseconds": {
            name: round(1e3 * statistics.median(clock for clock, _ in each), 2) for name, each in times.items()
        },
        "weighted over plain, of the clock and of the processor": against(times, "plain")["weighted"],
    }
    print(json.dumps(report, indent=1))
    if arguments.out:
        write_result(arguments.out, report)


if __name__ == "__main__":
    main()
