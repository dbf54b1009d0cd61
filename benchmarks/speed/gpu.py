"""What methods cost on a GPU: Llama-3.1-8B's geometry with random weights in bf16, nothing to download.

    python benchmarks/speed/gpu.py [--contexts 8k,32k,128k] [--batches 1,4,8] [--cells TEXTS] [--minutes N] [--out FILE]
    python benchmarks/speed/gpu.py --show benchmarks/results/gpu.json      # tables of saved numbers
    python benchmarks/speed/gpu.py --tiny --out FILE                       # the whole script on the CPU, in seconds

A cell is a context, a batch of rows of that length, and a contender: a warm-up, in which work is counted, then the
rounds. Each is written at once and not measured again by a later call with the same settings. A prompt is read in
one pass where that fits the memory, else in chunks; a cell that cannot fit is skipped, with the reason. Contenders run
one after another, so ratios are those of medians, not of rounds.

Costs do not depend on what weights say, choices do: they are meaningless here. ASL's selection layer would follow from
the ranks; tau=2 makes it select at its first layer, 15, which is FastKV's. GemFilter always filters.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StoppingCriteria, StoppingCriteriaList

from kvsieve.cli.output import print_table, printed_warnings
from kvsieve.cli.specs import MethodRun, compared_methods, make_runs, measured
from kvsieve.hf.compat import CACHE
from kvsieve.hf.decode.engines import ENGINES
from kvsieve.hf.generate.peak_memory import measure_peak
from kvsieve.lab.bench.compare import Limits, element_bytes, run_length, summarise
from kvsieve.lab.bench.contenders import BASELINE, Contender, KvsieveMethod, Transformers
from kvsieve.lab.bench.geometry import Geometry, geometry
from kvsieve.lab.bench.plain import held_bytes
from kvsieve.lab.bench.prompts import TokensPrompt
from kvsieve.lab.bench.roofline import Rates, measure_rates
from kvsieve.lab.bench.tables import notes, tables
from kvsieve.lab.bench.work import Work
from kvsieve.planning.quantities import parse_lengths
from kvsieve.report.environment import environment, write_result

GENERATE = "transformers generate"
METHODS = (
    "full,fastkv:paper=true:tsp_layer=15:tsp_rate=0.2:budget=10%,snapkv:paper=true:budget=10%,lagkv:budget=10%,"
    "adakv:paper=true:budget=10%,"
    "asl:paper=true:budget=2048:first=15:tau=2,gemfilter:paper=true:budget=1024:layer=13,"
    "rocketkv:budget=256,rocketkv:budget=1024,rocketkv:budget=4096,quest:budget=256,hsa:budget=256"
)
# Of full KV and of the first evictor.
CODECS: list[str | None] = ["kivi:bits=4", "kivi:bits=2", "rotated:bits=4"]
LLAMA = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    # The longest prompt and its answer; the checkpoint's own 131072 would leave no room behind 128K tokens.
    max_position_embeddings=131072 + 4096,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
TINY = LLAMA | dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16384,
)
# ASL compares two layers at least and selects before the last, so two layers are too few for it.
TINY_METHODS = (
    "full,fastkv:paper=true:tsp_layer=0:tsp_rate=0.2:budget=10%,snapkv:paper=true:budget=10%,lagkv:budget=10%:lag=8,"
    "adakv:paper=true:budget=10%,"
    "gemfilter:paper=true:budget=40:layer=0,rocketkv:budget=64"
)
TINY_CODECS: list[str | None] = ["kivi:bits=4:block=8:tail=8"]
CHUNKS = (None, 65536, 16384, 4096)
# Left to the allocator and to what is not counted.
SPARE = 0.08


class Generate:
    """`model.generate` of transformers with its own cache, as users call it."""

    name, pads, here = GENERATE, True, True

    def __init__(self, model: Any, chunk: int | None) -> None:
        self.model, self.chunk = model, chunk

    def run(self, prompt: TokensPrompt, new_tokens: int, work: Work | None = None) -> dict[str, Any]:
        cache, clock = DynamicCache(config=self.model.config), _Clock(work)
        chunk = {} if self.chunk is None else {"prefill_chunk_size": self.chunk}
        with measure_peak(self.model.device) as peak:
            clock.note(prompt.ids)
            self.model.generate(
                prompt.ids,
                attention_mask=torch.ones_like(prompt.ids),
                **{CACHE: cache},
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
                **chunk,
            )
        began, first, *_, last = clock.times
        held = held_bytes(cache)
        seen = cache.get_seq_length()
        return {
            "rows": len(prompt.ids),
            "ttft_s": first - began,
            "tpot_s": (last - first) / (new_tokens - 1),
            "kv_bytes": held,
            # From one entry behind the prompt to the last.
            "kv_read_bytes": round(held / seen * (seen - new_tokens / 2 + 1)),
            "peak_bytes": peak.bytes,
            "applied": True,
            "notes": [],
        }

    def describe(self) -> dict[str, Any]:
        return {"kind": GENERATE, "cache": "DynamicCache", "attention": self.model.config._attn_implementation}


class _Clock(StoppingCriteria):
    """Notes when each token was chosen; at the first one the prompt's work is counted."""

    def __init__(self, work: Work | None) -> None:
        self.work, self.times = work, []

    def note(self, ids: torch.Tensor) -> None:
        if ids.is_cuda:
            torch.cuda.synchronize(ids.device)
        self.times.append(time.perf_counter())

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.note(input_ids)
        if self.work is not None:
            self.work.stop()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class Cell:
    """context: tokens of each row. contender: a label."""

    context: int
    batch: int
    contender: str

    @property
    def key(self) -> str:
        return f"{self.context}/{self.batch}/{self.contender}"


def build(config: dict[str, Any], device: str) -> Any:
    """A model with random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**config), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    # No token ends an answer.
    model.generation_config.eos_token_id = None
    return model.eval()


def bytes_needed(
    found: Geometry, settings: dict[str, Any], cell: Cell, chunk: int | None, run: MethodRun | None
) -> int:
    """Weights, entries at the worst moment, and the activations of one pass, in bf16; an estimate.

    run: None for transformers. Read in one pass, a plan that evicts holds one layer's entries beside what stays, here
    taken to be half; read in chunks, everything.
    """
    config = settings["config"]
    tokens = cell.batch * min(cell.context, chunk or cell.context)
    layers = [layer.kv_elements for layer in found.layers]
    share = 0.5 if run is not None and run.plan.evict is not None and chunk is None else 1.0
    entries = (share * sum(layers) + max(layers)) * cell.batch * (cell.context + settings["new_tokens"])
    if run is None:
        # transformers makes a longer copy of a layer's entries for every token.
        entries += max(layers) * cell.batch * cell.context
    # Gate, up and their product; hidden states, residual, queries and outputs; what waits for propagation.
    activations = tokens * (3 * config["intermediate_size"] + 8 * config["hidden_size"])
    if chunk is not None and run is not None and run.plan.propagate is not None:
        activations += cell.batch * cell.context * config["hidden_size"] * 2
    # The mask of a chunk of transformers', as booleans and as numbers.
    masks = 3 * tokens * cell.context if run is None and chunk is not None else 0
    return int(2 * (found.parameters + entries + activations)) + masks


def choose_chunk(needed: Any, total: int) -> tuple[int | None, str | None]:
    """The largest pass that fits `total` bytes, or why none does. needed: bytes for a chunk."""
    for chunk in CHUNKS:
        if needed(chunk) <= (1 - SPARE) * total:
            return chunk, None
    gib = 2**30
    return None, f"needs about {needed(CHUNKS[-1]) / gib:.0f} GiB, the device has {total / gib:.0f} GiB"


def make_contender(model: Any, name: str, run: MethodRun | None, chunk: int | None, decode: str) -> Contender:
    if run is not None:
        return KvsieveMethod(model, run.plan, name, chunk, decode)
    return Transformers(model, chunk) if name == BASELINE else Generate(model, chunk)


def measure_cell(
    model: Any, cell: Cell, run: MethodRun | None, limits: Limits, settings: dict[str, Any]
) -> dict[str, Any]:
    """Samples and counted work of a cell, or why it was skipped."""
    device, chunk = model.device, None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        chunk, reason = choose_chunk(lambda each: bytes_needed(limits.geometry, settings, cell, each, run), total)
        if reason is not None:
            return {"skipped": reason}
    made = torch.Generator().manual_seed(cell.context)
    ids = torch.randint(3, settings["config"]["vocab_size"], (cell.batch, cell.context), generator=made).to(device)
    contender = make_contender(model, cell.contender, run, chunk, settings["decode"])
    try:
        *_, entry = run_length(
            [contender], [TokensPrompt(ids)], settings["new_tokens"], settings["rounds"], model=model, limits=limits
        )
    except torch.cuda.OutOfMemoryError as error:
        return {"skipped": f"out of memory: {str(error).splitlines()[0]}", "chunk": chunk}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"samples": entry["samples"][cell.contender], "work": entry["work"][cell.contender], "chunk": chunk}


def summaries(report: dict[str, Any], limits: Limits) -> dict[str, dict[str, dict[str, Any]]]:
    """batch -> context -> contender -> summary, of the cells that were measured, in the contenders' order."""
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for batch, context in itertools.product(report["batches"], report["contexts"]):
        cells = {name: report["cells"].get(Cell(context, batch, name).key, {}) for name in report["contenders"]}
        samples = {name: cell["samples"] for name, cell in cells.items() if "samples" in cell}
        if samples:
            work = {name: cells[name]["work"] for name in samples}
            found = summarise(samples, report["new_tokens"], work, limits)
            out.setdefault(str(batch), {})[str(context)] = found
    return out


def show(report: dict[str, Any]) -> None:
    rates = report["rates"]
    print(f"{report['model']}, {report['device']}, {report['new_tokens']} new tokens, {report['decode']} decoding")
    print(f"matrix-vector {rates['bandwidth_gb_per_s']:.0f} GB/s, matmul {rates['matmul_tflops']:.0f} TFLOP/s")
    for batch, contexts in report["summary"].items():
        # Rows are equal here, so there is no batch of unequal ones to compare with its rows.
        part = {"lengths": {name: {"summary": each} for name, each in contexts.items()}, "batch": 1}
        for title, headers, rows in tables(part):
            print(f"\nbatch {batch}: {title}")
            print_table(headers, rows)
        for note in notes(part):
            print(f"note: batch {batch}: {note}")
    for key, cell in report["cells"].items():
        if "skipped" in cell:
            print(f"skipped: {key}: {cell['skipped']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--contexts")
    parser.add_argument("--batches")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--decode", default="auto", choices=ENGINES, help="of kvsieve; auto is a CUDA graph here")
    parser.add_argument("--cells", default="", help="only those whose context/batch/contender holds one of these")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after so many")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "gpu.json")
    parser.add_argument("--tiny", action="store_true", help="a tiny geometry on the CPU: tries the script")
    parser.add_argument("--show", type=Path, help="print a saved result and measure nothing")
    arguments = parser.parse_args()
    if arguments.show:
        show(json.loads(arguments.show.read_text()))
        return
    if not torch.cuda.is_available() and not arguments.tiny:
        sys.exit("error: benchmarks/speed/gpu.py needs a CUDA device and finds none; --tiny tries it on the CPU")
    with printed_warnings():
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    tiny = arguments.tiny
    config = TINY if tiny else LLAMA
    runs: dict[str, MethodRun | None] = {BASELINE: None, GENERATE: None}
    methods = compared_methods(TINY_METHODS if tiny else METHODS, None)
    for run in methods + make_runs(
        [(run.name, run.given) for run in methods if run.name in ("full", "snapkv")], TINY_CODECS if tiny else CODECS
    ):
        runs[run.full_label] = measured(run)
    settings = {
        "config": config,
        "decode": arguments.decode,
        "new_tokens": arguments.new_tokens or (6 if tiny else 256),
        "rounds": arguments.rounds or (1 if tiny else 3),
    }
    model = build(config, "cpu" if tiny else "cuda")
    fresh: dict[str, Any] = {
        "environment": environment(model),
        "model": "tiny geometry, random weights" if tiny else "Llama-3.1-8B geometry, random weights",
        "dtype": "bfloat16",
        "device": str(model.device),
        **settings,
        "contexts": parse_lengths(arguments.contexts or ("256,384" if tiny else "8k,32k,128k"), "--contexts"),
        "batches": [int(each) for each in (arguments.batches or ("1,2" if tiny else "1,4,8")).split(",")],
        "note": "weights and tokens are random: costs are real, choices are not; ASL's tau and first make it select",
        "contenders": {},
    }
    for name, run in runs.items():
        fresh["contenders"][name] = make_contender(model, name, run, None, arguments.decode).describe()
    report = resumed(arguments.out, fresh)
    found = geometry(model.config)
    if report.get("rates") is None:
        report["rates"] = measure_rates(model).to_dict()
    rates = Rates(report["rates"]["bandwidth_gb_per_s"] * 1e9, report["rates"]["matmul_tflops"] * 1e12)
    limits = Limits(found, rates, element_bytes(model))
    for context, batch, name in itertools.product(fresh["contexts"], fresh["batches"], runs):
        cell = Cell(context, batch, name)
        if cell.key in report["cells"] or not any(text in cell.key for text in arguments.cells.split(",")):
            continue
        if time.monotonic() - began > 60 * arguments.minutes:
            print(f"stopped after {arguments.minutes:g} minutes, before {cell.key}; the same command goes on there")
            break
        print(cell.key, file=sys.stderr, flush=True)
        report["cells"][cell.key] = {
            **measure_cell(model, cell, runs[name], limits, settings),
            "env": environment(model),
        }
        report["summary"] = summaries(report, limits)
        write_result(arguments.out, report)
    if report["cells"]:
        rates = rates.best(measure_rates(model))
        report["rates"] = rates.to_dict()
        report["summary"] = summaries(report, Limits(found, rates, element_bytes(model)))
        write_result(arguments.out, report)
    show(report)


def resumed(file: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The report to go on with: the saved one where it was made with the same settings, of these contexts and more."""
    report = {**fresh, "rates": None, "cells": {}, "summary": {}}
    if not file.exists():
        return report
    saved = json.loads(file.read_text())
    for name in ("model", "config", "decode", "new_tokens", "rounds", "contenders"):
        if saved.get(name) != fresh[name]:
            sys.exit(f"error: {file} was measured with another {name}; give another --out, or delete it")
    # Cells of one file must be comparable.
    device = fresh["environment"]["device"]
    if saved["environment"]["device"] != device:
        sys.exit(f"error: {file} was measured on {saved['environment']['device']}, not {device}; give another --out")
    for name in ("contexts", "batches"):
        saved[name] = sorted({*saved[name], *fresh[name]})
    return saved


if __name__ == "__main__":
    main()
