"""Time of a tentative pass over several tokens beside that of a pass over one, in turns.

    python benchmarks/speed/tentative.py [--model DIRECTORY] [--length 4096] [--plans "full;kivi"] [--tokens 1,2,5,9,17]
        [--rounds 15] [--out FILE]

No prompt is read: the cache of every plan is filled with random entries (reading_cost.py). A round runs a plain pass
over one token and tentative passes over each number of tokens, all of which are taken back, so that every pass meets
the same entries. Ratios to the plain pass are taken within a round; medians of them are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from reading_cost import LAST, filled, spec

import kvsieve
from kvsieve.hf.forward.request import PassRequest
from kvsieve.lab.bench.prompts import text_ids
from kvsieve.report.environment import environment, write_result


def spent(sieve: Any, cache: Any, ids: torch.Tensor, request: PassRequest) -> float:
    began = time.perf_counter()
    result = sieve.feed(cache, ids, None, request, logits=ids.shape[1])
    seconds = time.perf_counter() - began
    if result.transaction is not None:
        result.transaction.accept(0)
    return seconds


def measured(model: Any, plan: kvsieve.Plan, ids: torch.Tensor, arguments: Any) -> dict[str, Any]:
    """Milliseconds of a plain pass, and by number of tokens those of tentative passes and their ratios to it."""
    sizes = [int(each) for each in arguments.tokens.split(",")]
    plain, times = [], {size: [] for size in sizes}
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = filled(sieve, ids, arguments.length, arguments.rounds + 1)
        for _ in range(arguments.rounds + 1):
            plain.append(spent(sieve, cache, ids[:, :1], PassRequest(phase="decode")))
            for size in sizes:
                times[size].append(spent(sieve, cache, ids[:, :size], PassRequest(tentative=True)))
    # The first round warms up.
    ratios = {size: [a / b for a, b in zip(each[1:], plain[1:], strict=True)] for size, each in times.items()}
    return {
        "one token": round(1e3 * statistics.median(plain[1:]), 2),
        "tentative": {size: round(1e3 * statistics.median(each[1:]), 2) for size, each in times.items()},
        "ratio": {size: round(statistics.median(each), 3) for size, each in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a checkpoint's directory; the demo model where it is left out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--plans", default="full", help="separated by semicolons; parameters as name=value")
    parser.add_argument("--tokens", default="1,2,5,9,17")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if arguments.model:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    else:
        model, tokenizer = kvsieve.models.load_demo(dtype=dtype)
    ids = text_ids(tokenizer)[:, : 2 * LAST]
    report = {
        "environment": environment(model),
        "model": Path(arguments.model).name if arguments.model else "demo",
        "dtype": arguments.dtype,
        "length": arguments.length,
        "milliseconds": {each: measured(model, spec(each), ids, arguments) for each in arguments.plans.split(";")},
    }
    print(json.dumps(report, indent=1))
    if arguments.out:
        write_result(arguments.out, report)


if __name__ == "__main__":
    main()
