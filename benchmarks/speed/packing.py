"""Prefills of several prompts in one pass beside one after the other, and what a shared read in decoding would save.

    python benchmarks/speed/packing.py [--model DIR] [--threads 2] [--rounds 9] [--length 4096] [--rows 8]
        [--mixes "8,16,24,48;32,64,96,128;128,256,384,512;512,640,768,1024"] [--out FILE]

A mix is four prompts of unequal lengths. Together, linear layers take the tokens of all prompts as one matrix, and each
prompt attends alone, as the server's pass over the next tokens of all answers does; one after the other, each prompt is
a pass. Ratios are taken within a round; medians are reported, and whether the logits are equal bit for bit.

Then --rows answers to one prompt of --length tokens get a token each in a joint pass, in which each row reads its own
cache. Beside it are a tentative pass of as many tokens over one cache, which reads the same entries once for all (the
least that a shared read could take), and a joint pass after a short prompt.
"""

from __future__ import annotations

import argparse
import contextvars
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvsieve
from kvsieve.decoding.loop import feed_rows
from kvsieve.hf.attach import attached
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.passes import activate, current, open_session
from kvsieve.hf.forward.request import PLAIN, PassRequest
from kvsieve.hf.forward.rows import RowsCache, RowsSession
from kvsieve.planning.plans import Plan
from kvsieve.report.environment import environment, write_result

PROMPT = PassRequest(phase="prefill")
MIXES = "8,16,24,48;32,64,96,128;128,256,384,512;512,640,768,1024"
SHORT = 16


def one_by_one(sieve: Any, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Prefill prompts; return the logits [V] of each one's last token."""
    found = []
    for ids in prompts:
        cache = sieve.new_cache()
        cache.begin_turn(ids.shape[1])
        found.append(sieve.feed(cache, ids, None, PROMPT, logits=1).logits[0, -1])
    return found


def together(sieve: Any, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Do the same in one pass."""
    return contextvars.copy_context().run(_together, sieve, prompts)


def _together(sieve: Any, prompts: Sequence[Tensor]) -> list[Tensor]:
    outer = current()
    caches = [sieve.new_cache() for _ in prompts]
    rows = []
    for cache, ids in zip(caches, prompts, strict=True):
        cache.begin_turn(ids.shape[1])
        rows.append(open_session(sieve.context, sieve.plan, cache, {"input_ids": ids}, PROMPT))
    widths = [ids.shape[1] for ids in prompts]
    joint = RowsCache(caches)
    facts = Plan(), None, caches[0], rows[0].step, rows[0].tokens, sieve.context, PLAIN, outer
    session = RowsSession(*facts, rows=rows, together=joint, widths=widths)
    call = {
        "input_ids": torch.cat([*prompts], 1),
        "attention_mask": None,
        "position_ids": torch.cat([torch.arange(width)[None] for width in widths], 1),
        "use_cache": True,
        CACHE: joint,
    }
    with activate(session):
        hidden = sieve.run_pass(session, call, 0)[0]
        ends = torch.tensor(widths).cumsum(0) - 1
        with torch.no_grad():
            return list(sieve.model.lm_head(hidden[0, ends]))


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def packed(sieve: Any, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Times of a mix."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, sieve.config.vocab_size, (1, size), generator=draw) for size in sizes]
    times: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        apart, alone = seconds(lambda: one_by_one(sieve, prompts))
        joint, joined = seconds(lambda: together(sieve, prompts))
        if number:
            times.append((apart, joint))
    return {
        "tokens": sizes,
        "one_by_one_s": round(statistics.median(apart for apart, _ in times), 4),
        "together_s": round(statistics.median(joint for _, joint in times), 4),
        "ratio": round(statistics.median(joint / apart for apart, joint in times), 3),
        "equal_logits": all(torch.equal(a, b) for a, b in zip(alone, joined, strict=True)),
        "largest_difference": round(max(float((a - b).abs().max()) for a, b in zip(alone, joined, strict=True)), 4),
    }


def shared(sieve: Any, length: int, rows: int, rounds: int) -> dict[str, Any]:
    """Times of passes over a token of each of some answers to one prompt."""
    draw = torch.Generator().manual_seed(0)

    def prompt(size: int) -> Tensor:
        return torch.randint(3, sieve.config.vocab_size, (1, size), generator=draw)

    whole = sieve.prefill(prompt(length), chunk=1024)
    forks = [whole.fork() for _ in range(rows)]
    short = [sieve.prefill(prompt(SHORT)) for _ in range(rows)]
    ids = [prompt(1) for _ in range(rows)]

    def once() -> None:
        result = sieve.feed(whole, torch.cat(ids, 1), None, PassRequest(tentative=True), logits=rows)
        result.transaction.accept(0)

    passes: dict[str, Callable[[], Any]] = {
        "joint_s": lambda: feed_rows(sieve, forks, ids),
        "one_read_s": once,
        "short_prompt_s": lambda: feed_rows(sieve, short, ids),
    }
    times: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds + 3):
        for name, run in passes.items():
            spent = seconds(run)[0]
            if number >= 3:
                times[name].append(spent)
    found = {name: round(statistics.median(each), 5) for name, each in times.items()}
    ratios = [one / joint for one, joint in zip(times["one_read_s"], times["joint_s"], strict=True)]
    return {"tokens": length, "rows": rows, **found, "ratio": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a checkpoint's directory; the demo model if left out")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mixes", default=MIXES)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "packing.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model, tokenizer = kvsieve.models.load(arguments.model)
    report: dict[str, Any] = {
        "environment": environment(model),
        "model": Path(arguments.model).name if arguments.model else "demo",
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "mixes": [],
    }
    with attached(model, Plan(), "auto", tokenizer, any_plan=True) as sieve, torch.no_grad():
        for mix in arguments.mixes.split(";"):
            report["mixes"].append(packed(sieve, [int(size) for size in mix.split(",")], arguments.rounds))
            print(report["mixes"][-1], flush=True)
        report["decoding"] = shared(sieve, arguments.length, arguments.rows, arguments.rounds)
        print(report["decoding"])
    write_result(arguments.out, report)
    print(json.dumps(report["mixes"], indent=1))


if __name__ == "__main__":
    main()
