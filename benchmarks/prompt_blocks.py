"""Sparse prompts on this CPU: a layer's time beside attention over everything, and the executor's ways side by side.

    python benchmarks/prompt_blocks.py [--lengths 8192,16384] [--densities 0.25,0.15] [--rounds 3] [--out FILE]
    python benchmarks/prompt_blocks.py --model DIR [--lengths 8192,16384] [--rounds 3] [--out FILE]

Queries, keys and values are random, in the sizes of Qwen2.5-Coder-0.5B (14 heads, 2 of keys, 64 channels), and so are
the blocks, beside the first one, the one before the diagonal, and all that the last block of queries sees. In each
round everything runs in turn; numbers are medians over rounds of seconds over those of attention over everything.

full: as an exact prompt is read here. products: blocks by torch's operations. compiled: by the C kernel, where there is
one. everything: all blocks by the C kernel. choosing: what XAttention needs to choose. error: largest difference of
compiled from products.

With a model, the same of whole prompts, of the needle task: times to the first token of full KV and of `xattention` by
both ways, the processor's seconds beside them, after a short prompt that does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import kvsieve
from kvsieve.attention import dense_attention, prompt_attention
from kvsieve.attention.prompt import why_torch
from kvsieve.core.blocks import BlockGrid, PromptContext
from kvsieve.eval.evaluator import Evaluator
from kvsieve.kernels.cpu import prompt as compiled
from kvsieve.methods import XAttention
from kvsieve.plans import Plan
from kvsieve.report.environment import environment
from kvsieve.report.tables import markdown_table
from kvsieve.tasks import chosen_tasks

HEADS, GROUPS, DIM = 2, 7, 64
COLUMNS = ("full", "products", "compiled", "everything", "choosing")


def by_products(*given: Any, **options: Any) -> Tensor:
    """Attend by torch's operations, whatever the processor is."""
    with mock.patch.object(compiled, "takes", lambda *sizes: False):
        return prompt_attention(*given, **options)


def layer(length: int, density: float, rounds: int) -> dict[str, Any]:
    """Measure a prompt of so many tokens."""
    made = torch.Generator().manual_seed(length)
    shape = (1, length, HEADS * GROUPS, DIM)
    query = torch.randn(shape, generator=made).bfloat16().transpose(1, 2)
    keys, values = (torch.randn(1, HEADS, length, DIM, generator=made).bfloat16() for _ in range(2))
    role, scale = XAttention(), DIM**-0.5
    grid = BlockGrid(length, length, role.queries, role.block)
    ctx = PromptContext(0, 24, query, keys, scale, grid)
    always = role.always(ctx)
    chosen = torch.rand(1, HEADS * GROUPS, *always.shape, generator=made) < density
    # What is always computed counts too: as many of the others are left out.
    chosen = (chosen & (torch.rand(chosen.shape, generator=made) > always.float().mean())) | always
    whole = torch.ones_like(chosen)
    runs: dict[str, Callable[[], Tensor]] = {
        "full": lambda: dense_attention(query, keys, values, scale=scale),
        "products": lambda: by_products(query, keys, values, chosen, grid, scale=scale),
        "choosing": lambda: role.select(ctx),
    }
    if why_torch() is None:
        runs["compiled"] = lambda: prompt_attention(query, keys, values, chosen, grid, scale=scale)
        runs["everything"] = lambda: prompt_attention(query, keys, values, whole, grid, scale=scale)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if at:
                seconds[name].append(time.perf_counter() - began)
    seen = grid.visible(chosen.device)
    row: dict[str, Any] = {"tokens": length, "density": round(float(chosen[..., seen].float().mean()), 3)}
    row["full_s"] = round(statistics.median(seconds["full"]), 3)
    for name in COLUMNS:
        if name in runs:
            pairs = zip(seconds[name], seconds["full"], strict=True)
            row[name] = round(statistics.median(mine / full for mine, full in pairs), 3)
    if "compiled" in runs:
        row["error"] = float((runs["compiled"]() - runs["products"]()).abs().max())
    return row


def prompts(model: Any, tokenizer: Any, length: int, rounds: int) -> dict[str, Any]:
    """Measure times to the first token of one prompt of so many tokens."""
    (task,) = chosen_tasks(["needle"])
    text = task.sample(5, length, 0, Evaluator(model, tokenizer).prompter.count).context
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :length]
    plans = {"full": Plan(), "products": kvsieve.plan("xattention"), "compiled": kvsieve.plan("xattention")}
    spent: dict[str, list[float]] = {name: [] for name in plans}
    worked: dict[str, list[float]] = {name: [] for name in plans}
    row: dict[str, Any] = {"tokens": ids.shape[1]}
    for at in range(rounds + 1):
        for name, plan in plans.items():
            way = mock.patch.object(compiled, "takes", lambda *sizes: False) if name == "products" else nullcontext()
            with kvsieve.attach(model, plan) as sieve, torch.no_grad(), way:
                began = time.process_time()
                stats = sieve.generate(ids if at else ids[:, :2048], max_new_tokens=1, do_sample=False).stats
                if at:
                    spent[name].append(stats.ttft_s)
                    worked[name].append(time.process_time() - began)
                    row["density"], row["recall"] = stats.prompt_density, stats.prompt_recall
        print(f"{length} tokens: round {at} of {rounds}", flush=True)
    for name in plans:
        row[f"{name}_s"] = round(statistics.median(spent[name]), 2)
        for which, seconds in (("", spent), ("_cpu", worked)):
            ratios = [mine / full for mine, full in zip(seconds[name], seconds["full"], strict=True)]
            row[name + which] = round(statistics.median(ratios), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="A directory or hub id, of which whole prompts are measured.")
    parser.add_argument("--lengths", default="8192,16384")
    parser.add_argument("--densities", default="0.25,0.15")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "prompt_blocks.json")
    given = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(), "kernel": why_torch() or "compiled"}
    lengths, rows = list(map(int, given.lengths.split(","))), []
    if given.model:
        model, tokenizer = kvsieve.models.load(given.model)
        report["model"] = f"{Path(given.model).name}, {str(model.dtype).removeprefix('torch.')}"
        rows = [prompts(model, tokenizer, length, given.rounds) for length in lengths]
    else:
        with torch.no_grad():
            densities = map(float, given.densities.split(","))
            rows = [layer(length, density, given.rounds) for density in densities for length in lengths]
    given.out.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")
    print(markdown_table(list(rows[0]), [[str(row.get(name, "")) for name in rows[0]] for row in rows]))


if __name__ == "__main__":
    main()
