"""Time per token of sparse reading where layers share a choice, and the choice's part of it, paired round by round.

    python benchmarks/speed/shared_choice.py [--model DIRECTORY] [--length 32000] [--plan rocketkv:budget=512]
        [--share 1,4] [--out FILE]

As reading_cost.py, the cache of every plan is filled with random entries up to the last tokens, and plans take turns,
`--tokens` tokens at a time, in one process. Besides the numbers of `--share` the plan is run with one choice for all
layers. The times with a choice in every layer and with a single one give the time of a choice and of all else:
choice = (T(every) - T(single)) / (layers - 1), rest = T(every) - layers * choice. The part of a plan's choices is its
time without the rest; it is reported in milliseconds and over that of a choice in every layer, as medians of ratios
within a round. `dense` is full KV beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reading_cost import LAST, Contender, against, rounds, spec

import kvsieve
from kvsieve.lab.bench.prompts import text_ids
from kvsieve.report.environment import environment, write_result

Times = dict[str, list[tuple[float, float]]]


def shared(plan: kvsieve.Plan, share: int) -> kvsieve.Plan:
    """Return the plan with so many layers to a choice."""
    return dataclasses.replace(plan, read=dataclasses.replace(plan.read, share=share))  # type: ignore[type-var]


def parts(times: Times, every: str, single: str, layers: int, names: list[str]) -> dict[str, Any]:
    """Return the milliseconds of all choices of each plan and their ratios to a choice in every layer."""
    found: dict[str, Any] = {}
    for name in names:
        spent: list[list[float]] = [[], []]
        ratios: list[list[float]] = [[], []]
        for own, all_layers, one_layer in zip(times[name], times[every], times[single], strict=True):
            for at in (0, 1):
                choice = (all_layers[at] - one_layer[at]) / (layers - 1)
                rest = all_layers[at] - layers * choice
                spent[at].append(1e3 * (own[at] - rest))
                ratios[at].append((own[at] - rest) / (layers * choice))
        found[name] = {
            "milliseconds": [round(statistics.median(one), 3) for one in spent],
            "over a choice in every layer": [round(statistics.median(one), 3) for one in ratios],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a checkpoint's directory; the demo model where it is left out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--plan", default="rocketkv:budget=512", help="a method that reads, without share=")
    parser.add_argument("--share", default="1,4", help="layers that share a choice, separated by commas")
    parser.add_argument("--decode", default="fused")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=6, help="of a round")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if arguments.model:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    else:
        model, tokenizer = kvsieve.models.load_demo(dtype=dtype)
    layers = model.config.num_hidden_layers
    ids = text_ids(tokenizer)[:, : 2 * LAST].expand(arguments.batch, -1)
    new = (arguments.rounds + 1) * (arguments.tokens + 1)
    joint = "," if ":" in arguments.plan else ":"
    shares = sorted({1, *(int(share) for share in arguments.share.split(","))})
    names = {share: f"{arguments.plan}{joint}share={share}" for share in (*shares, layers)}
    plans = {name: shared(spec(arguments.plan), share) for share, name in names.items()}
    plans["dense"] = spec("full")
    contenders = {
        name: Contender(model, plan, arguments.decode, ids, arguments.length, new) for name, plan in plans.items()
    }
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        name: (lambda each=each: each.run(arguments.tokens)) for name, each in contenders.items()
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
        "numbers": "of the clock, and of the processor's time",
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
