"""Attention on this processor: torch's fused kernel beside products (kvsieve.attention.causal, single_query_attention).

    python benchmarks/attention.py [--lengths 1000,2000,4000,7500] [--rounds 7] [--out FILE]

bf16, the demo model's shape: milliseconds per layer for a whole prompt and for one decoded token (30 layers' keys and
values in turn, so that they come from memory; also by the C kernel for tokens), all kinds in turns, medians of rounds
and of their ratios. Then what the demo model makes of each: its next-token distributions beside those of the same
weights in float32. Where
`kvsieve.attention.choice.faster_here` is False the products are timed all the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import kvsieve
from kvsieve.attention import blocked, causal, choice, dense
from kvsieve.bench.prompts import text_ids
from kvsieve.kernels.cpu import token as native
from kvsieve.report.environment import environment

HEADS, GROUPS, DIM, LAYERS = 3, 3, 64, 30
SCALE = DIM**-0.5


def in_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, and medians of their ratios to the first's within a round.

    "ratio" is the second's, "in_c_ratio" the third's where there is one.
    """
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            if turn:
                spent[name].append(1e3 * (time.perf_counter() - began))
    first, *others = spent.values()
    out = {name: round(statistics.median(runs), 4) for name, runs in spent.items()}
    for name, runs in zip(("ratio", "in_c_ratio"), others, strict=False):
        out[name] = round(statistics.median(b / a for a, b in zip(first, runs, strict=True)), 3)
    return out


def prompt(length: int, rounds: int) -> dict[str, float]:
    query = torch.randn(1, HEADS * GROUPS, length, DIM, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 1, HEADS, length, DIM, dtype=torch.bfloat16)
    return in_turns(
        {
            "fused_ms": lambda: F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True),
            "products_ms": lambda: causal.causal_attention(query, keys, values, scale=SCALE),
        },
        rounds,
    )


def token(length: int, rounds: int) -> dict[str, float]:
    query = torch.randn(1, HEADS, GROUPS, DIM, dtype=torch.bfloat16)
    token = query.view(1, HEADS * GROUPS, 1, DIM)
    layers = [torch.randn(2, 1, HEADS, length, DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]
    spent = in_turns(
        {
            "fused_ms": lambda: [F.scaled_dot_product_attention(query, keys, values) for keys, values in layers],
            "products_ms": lambda: [
                blocked.single_query_attention(query, keys, values, None, scale=SCALE) for keys, values in layers
            ],
            "in_c_ms": lambda: [native.token_attention(token, keys, values, scale=SCALE) for keys, values in layers],
        },
        rounds,
    )
    return {name: round(part / LAYERS, 4) if name.endswith("_ms") else part for name, part in spent.items()}


def fidelity(length: int = 1500) -> dict[str, dict[str, float]]:
    """KL divergence (nats) of the next-token distribution from float32's, and how often the best token agrees."""
    model, tokenizer = kvsieve.models.load_demo(torch.bfloat16)
    exact = kvsieve.models.load_demo(torch.bfloat16)[0].float()
    ids = text_ids(tokenizer)
    found: dict[str, list[Tensor]] = {"fused": [], "products": []}
    agreed: dict[str, list[Tensor]] = {"fused": [], "products": []}
    for start in (0, 20_000, 40_000, 60_000):
        fed = ids[:, start : start + length]
        truth = _log_probabilities(exact, fed, False)
        for name, products in (("fused", False), ("products", True)):
            ours = _log_probabilities(model, fed, products)
            found[name].append((truth.exp() * (truth - ours)).sum(-1))
            agreed[name].append(ours.argmax(-1) == truth.argmax(-1))
    return {
        name: {
            "kl_mean": round(float(torch.cat(found[name]).mean()), 6),
            "kl_p99": round(float(torch.cat(found[name]).quantile(0.99)), 5),
            "best_token_agrees": round(float(torch.cat(agreed[name]).float().mean()), 4),
        }
        for name in found
    }


def _log_probabilities(model, ids: Tensor, products: bool) -> Tensor:
    with kvsieve.attach(model, kvsieve.plan("full")), mock.patch.object(dense, "faster_here", lambda query: products):
        return model(ids).logits[0].float().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", default="1000,2000,4000,7500")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lengths = [int(part) for part in arguments.lengths.split(",")]
    with torch.no_grad():
        report = {
            "environment": environment(),
            "products_are_used_here": choice.faster_here(torch.zeros(1, dtype=torch.bfloat16)),
            "rounds": arguments.rounds,
            "prompt": {length: prompt(length, arguments.rounds) for length in lengths},
            "token": {length: token(length, 3 * arguments.rounds) for length in [250, 500, *lengths]},
            "fidelity": fidelity(),
        }
    print(json.dumps({name: report[name] for name in ("prompt", "token", "fidelity")}, indent=1))
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
