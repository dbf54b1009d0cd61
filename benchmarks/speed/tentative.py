"""Time of a tentative pass over several tokens beside that of a pass over one, in turns.

    python benchmarks/speed/tentative.py [--model DIRECTORY | --geometry llama|qwen] [--device cpu|cuda]
        [--lengths 4096] [--plans "full;kivi"] [--tokens 1,2,5,9,17] [--rounds 15] [--out FILE]

No prompt is read: the cache of every plan is filled with random entries (reading_cost.py), and tokens are random, so
that a model needs no tokenizer; with `--geometry` its weights are random, too. A round runs a plain pass over one token
and tentative passes over each number of tokens, all of which are taken back, so that every pass meets the same entries.
Ratios to the plain pass are taken within a round; medians of them are reported. On a GPU, where passes are recorded,
the result says how many were replayed and why others were not.
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
from gpu import LLAMA, build
from kvsieve.hf.forward.request import PassRequest
from kvsieve.report.environment import environment, write_result

GEOMETRIES = {
    "llama": LLAMA,
    "qwen": LLAMA
    | dict(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}
# Rounds that do not count: a number of tokens is recorded when it comes for the second time.
WARM = 3


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def spent(sieve: Any, cache: Any, ids: torch.Tensor, request: PassRequest) -> float:
    began = now(ids.device)
    result = sieve.feed(cache, ids, None, request, logits=ids.shape[1])
    seconds = now(ids.device) - began
    if result.transaction is not None:
        result.transaction.accept(0)
    return seconds


def measured(model: Any, plan: kvsieve.Plan, ids: torch.Tensor, length: int, arguments: Any) -> dict[str, Any]:
    """Milliseconds of a plain pass, and by number of tokens those of tentative passes and their ratios to it."""
    sizes = [int(each) for each in arguments.tokens.split(",")]
    rounds = WARM + arguments.rounds
    plain, times = [], {size: [] for size in sizes}
    with kvsieve.attach(model, plan) as sieve, torch.no_grad():
        cache = filled(sieve, ids, length, rounds)
        for _ in range(rounds):
            plain.append(spent(sieve, cache, ids[:, :1], PassRequest(phase="decode")))
            for size in sizes:
                times[size].append(spent(sieve, cache, ids[:, :size], PassRequest(tentative=True)))
        passes = cache.turn.record.passes
    ratios = {size: [a / b for a, b in zip(each[WARM:], plain[WARM:], strict=True)] for size, each in times.items()}
    found = {
        "one token": round(1e3 * statistics.median(plain[WARM:]), 2),
        "tentative": {size: round(1e3 * statistics.median(each[WARM:]), 2) for size, each in times.items()},
        "ratio": {size: round(statistics.median(each), 3) for size, each in ratios.items()},
    }
    return found | ({"passes": vars(passes)} if ids.is_cuda else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a checkpoint's directory; the demo model where it is left out")
    parser.add_argument("--geometry", choices=GEOMETRIES, help="random weights of this shape, in bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", default="4096")
    parser.add_argument("--plans", default="full", help="separated by semicolons; parameters as name=value")
    parser.add_argument("--tokens", default="1,2,5,9,17")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if arguments.geometry:
        model = build(GEOMETRIES[arguments.geometry], arguments.device)
    elif arguments.model:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval().to(arguments.device)
    else:
        model, _ = kvsieve.models.load_demo(dtype=dtype)
        model = model.to(arguments.device)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, 2 * LAST), generator=draw).to(arguments.device)
    report = {
        "environment": environment(model),
        "model": arguments.geometry or (Path(arguments.model).name if arguments.model else "demo"),
        "dtype": arguments.dtype,
        "milliseconds": {
            length: {
                plan: measured(model, spec(plan), ids, int(length), arguments) for plan in arguments.plans.split(";")
            }
            for length in arguments.lengths.split(",")
        },
    }
    print(json.dumps(report, indent=1))
    if arguments.out:
        write_result(arguments.out, report)


if __name__ == "__main__":
    main()
