"""Time per token of sparse readers, of evictors and of full KV beside each other, token by token in turns.

    python benchmarks/speed/reading_cost.py [--model DIRECTORY] [--length 7500] [--batch 1] [--decode fused,eager]
        [--plans "full;rocketkv:budget=256"] [--peer-python PYTHON] [--out FILE]

A prompt is not read: the cache of every plan is filled with random entries up to the last tokens, which are read, so
that evictors act on a prompt of the whole length. What a token costs does not depend on the values of entries. Every
plan then generates `--tokens` tokens in turn, round after round, in one process; ratios are taken within a round, and
medians of them are reported, of the clock and of the processor's time, which is the steadier one on a busy machine.
transformers, with `--plain`, reads a `DynamicCache` of as many random entries. FastKV is left out: after its prompt it
decodes as SnapKV does. With `--peer-python`, kvpress' SnapKV of 10% reads a prompt of such a length and generates in
that interpreter, `--peer-rounds` times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import kvsieve
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.request import PassRequest
from kvsieve.lab.bench.peer_process import Peer
from kvsieve.lab.bench.prompts import text_ids
from kvsieve.planning.named import plan_without_floor
from kvsieve.report.environment import environment, write_result

READERS = "full;rocketkv:budget=256;hsa:budget=256;quest:budget=256;sparq:budget=256"
PLANS = f"{READERS};snapkv:budget=10%;adakv:budget=10%;lagkv:budget=10%"
LAST = 64


def spec(text: str) -> kvsieve.Plan:
    name, _, options = text.partition(":")
    given = dict(part.split("=", 1) for part in options.split(",") if part)
    return plan_without_floor(
        name, **{key: json.loads(value) if value[0] in "tf" else value for key, value in given.items()}
    )


def random_entries(sieve: Any, cache: Any, length: int) -> None:
    """Go on with a prompt that is being read as if `length` tokens had come."""
    start, layers = cache.num_seen, list(cache.sieve_layers.values())
    # Every layer gets a copy of the same ones.
    keys, values = (
        torch.randn(part.shape[1], length, part.shape[3]).to(part.dtype).expand(len(part), -1, -1, -1)
        for part in (layers[0].keys, layers[0].values)
    )
    for layer in layers:
        layer.store.append(keys, values, torch.arange(start, start + length)[None], reserve=LAST + 600)
    cache.advance(length)


def filled(sieve: Any, ids: torch.Tensor, length: int, new_tokens: int) -> Any:
    """Return a cache as it is behind a prompt of so many tokens."""
    cache = sieve.new_cache()
    cache.begin_turn(length, new_tokens)
    sieve.feed(cache, ids[:, :LAST], None, PassRequest(None, "prefill", False))
    random_entries(sieve, cache, length - 2 * LAST)
    sieve.feed(cache, ids[:, -LAST:], None, PassRequest(None, "prefill", True))
    return cache


def plain_cache(model: Any, batch: int, length: int) -> Any:
    """Return transformers' cache of random entries."""
    config, cache = model.config, DynamicCache(config=model.config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        shape = batch, config.num_key_value_heads, length, dim
        cache.update(*(torch.randn(shape, dtype=model.dtype) for _ in range(2)), layer)
    return cache


class Contender:
    """One way of generating a token on a cache that is ready."""

    def __init__(
        self, model: Any, plan: kvsieve.Plan | None, decode: str, ids: torch.Tensor, length: int, new: int
    ) -> None:
        self.model, self.plan, self.decode, self.token = model, plan, decode, ids[:, -1:]
        self.cache: Any = None
        if plan is None:
            self.cache = plain_cache(model, len(ids), length)
            return
        with kvsieve.attach(model, plan, decode="eager") as sieve, torch.no_grad():
            self.cache = filled(sieve, ids, length, new)

    def run(self, tokens: int) -> tuple[float, float]:
        """Seconds per token of so many, the first left out: of the clock, and of the processor."""
        spent = []
        attached: Any = contextlib.nullcontext()
        if self.plan is not None:
            attached = kvsieve.attach(self.model, self.plan, decode=self.decode)
        with attached, torch.no_grad():
            for _ in range(tokens + 1):
                began = time.perf_counter(), time.process_time()
                self.model(self.token, **{CACHE: self.cache}, logits_to_keep=1)
                spent.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        return statistics.median(each[0] for each in spent[1:]), statistics.median(each[1] for each in spent[1:])


def rounds(
    contenders: dict[str, Callable[[], tuple[float, float]]], count: int
) -> dict[str, list[tuple[float, float]]]:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(count + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            spent = contenders[name]()
            if turn:
                times[name].append(spent)
            print(
                f"{turn} {name}: {1e3 * spent[0]:.1f} ms, {1e3 * spent[1]:.1f} of the processor",
                file=sys.stderr,
                flush=True,
            )
    return times


def against(times: dict[str, list[tuple[float, float]]], base: str) -> dict[str, list[float]]:
    """Medians of ratios within a round, of the clock and of the processor's time."""
    return {
        name: [
            round(statistics.median(a[at] / b[at] for a, b in zip(each, times[base], strict=True)), 3) for at in (0, 1)
        ]
        for name, each in times.items()
    }


def loaded(path: str | None, dtype: str) -> tuple[Any, Any]:
    """A checkpoint's model and tokenizer, in a dtype by its name; the demo model's where `path` is left out."""
    if not path:
        return kvsieve.models.load_demo(dtype=getattr(torch, dtype))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    return model, AutoTokenizer.from_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a checkpoint's directory; the demo model where it is left out")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", default="7500", help="several, separated by commas, take turns too")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--plans", default=PLANS, help="separated by semicolons; parameters as name=value")
    parser.add_argument("--decode", default="fused", help="fused, eager or both, separated by a comma")
    parser.add_argument("--plain", action="store_true", help="transformers beside them")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=6, help="of a round")
    parser.add_argument("--peer-python")
    parser.add_argument("--peer-rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lengths = [int(each) for each in arguments.length.split(",")]
    model, tokenizer = loaded(arguments.model, arguments.dtype)
    text = text_ids(tokenizer)
    ids = text[:, : 2 * LAST].expand(arguments.batch, -1)
    new = (arguments.rounds + 1) * (arguments.tokens + 1)
    contenders: dict[str, Contender] = {}
    if arguments.plain:
        contenders[f"transformers {lengths[-1]}"] = Contender(model, None, "eager", ids, lengths[-1], new)
    for decode in arguments.decode.split(","):
        for plan in arguments.plans.split(";"):
            for length in lengths:
                contenders[f"{plan} {decode} {length}"] = Contender(model, spec(plan), decode, ids, length, new)
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        name: (lambda each=each: each.run(arguments.tokens)) for name, each in contenders.items()
    }
    times = rounds(runs, arguments.rounds)
    ways = {
        name: each.cache.turn.record.reads.not_compiled or "compiled"
        for name, each in contenders.items()
        if each.plan is not None and each.plan.read is not None
    }
    report: dict[str, Any] = {
        "environment": environment(model),
        "model": Path(arguments.model).name if arguments.model else "demo",
        "dtype": arguments.dtype,
        "lengths": lengths,
        "batch": arguments.batch,
        "milliseconds": {
            name: [round(1e3 * statistics.median(one[at] for one in each), 2) for at in (0, 1)]
            for name, each in times.items()
        },
        "numbers": "of the clock, and of the processor's time",
        "sparse reading": ways,
    }
    for decode in arguments.decode.split(","):
        for length in lengths:
            here = {name: each for name, each in times.items() if name.endswith(f" {decode} {length}")}
            report[f"over full, {decode}, {length}"] = against(here, f"full {decode} {length}")
        if len(lengths) > 1:
            names = [f"{plan} {decode}" for plan in arguments.plans.split(";")]
            report[f"{lengths[-1]} over {lengths[0]}, {decode}"] = {
                name: against(times, f"{name} {lengths[0]}")[f"{name} {lengths[-1]}"] for name in names
            }
    if arguments.plain:
        report["over transformers"] = against(times, f"transformers {lengths[-1]}")
    if arguments.peer_python:
        report |= beside_peer(arguments, model, text[:, : lengths[-1]], contenders)
    print(json.dumps(report, indent=1))
    if arguments.out:
        write_result(arguments.out, report)


def beside_peer(arguments: Any, model: Any, text: torch.Tensor, contenders: dict[str, Contender]) -> dict[str, Any]:
    """Ratios to kvpress' SnapKV, which takes turns with the contenders."""
    ids = text.tolist()
    wanted = {name: each for name, each in contenders.items() if each.plan is not None and "10%" in name}
    ratios: dict[str, list[float]] = {name: [] for name in wanted}
    theirs = []
    with Peer(arguments.peer_python, model) as peer:
        for _ in range(arguments.peer_rounds):
            before = {name: each.run(arguments.tokens) for name, each in wanted.items()}
            theirs.append(peer.run(ids, 48, "snapkv", text.shape[1] // 10, {})["tpot_s"])
            after = {name: each.run(arguments.tokens) for name, each in wanted.items()}
            for name in wanted:
                ratios[name].append((before[name][0] + after[name][0]) / 2 / theirs[-1])
        versions = peer.versions
    return {
        "peer": versions,
        "peer's milliseconds": round(1e3 * statistics.median(theirs), 2),
        "over kvpress SnapKV 10%": {name: round(statistics.median(each), 3) for name, each in ratios.items()},
    }


if __name__ == "__main__":
    main()
