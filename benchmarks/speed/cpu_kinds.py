"""Full KV beside transformers on each kind of CPU that this one can be held to: time to the first token, and per token.

    python benchmarks/speed/cpu_kinds.py [--kinds avx2,avx512,native] [--tokens 4096] [--rounds 3] [--new-tokens 8]
        [--dtype auto]

Each kind is a process of its own, held by the environment: torch to ATEN_CPU_CAPABILITY, oneDNN to ONEDNN_MAX_CPU_ISA,
MKL to MKL_ENABLE_INSTRUCTIONS, and the compiler of kvsieve's own kernels by the options of COMPILED. There the demo
model is loaded in the dtype that "auto" comes to, or in --dtype, kvsieve reads a prompt at once and in chunks of 1024
tokens, and transformers reads it at once; all take turns on the same model object, after a short prompt each. Told are
medians of the rounds, of the ratios within a round and of those of the processor's seconds, which other work on the
machine disturbs less. A kind that this processor does not have is "not measured".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import kvsieve
from kvsieve.attention.choice import cpu_paths
from kvsieve.devices import AMX, ARM_BF16, AVX2, AVX512, AVX512_BF16, DtypeChoice, auto_dtype, cpu_kind
from kvsieve.lab.bench.contenders import Contender, KvsieveMethod, Transformers
from kvsieve.lab.bench.prompts import TokensPrompt, text_ids
from kvsieve.report.environment import environment, write_result

CHUNK = 1024
HELD: dict[str, dict[str, str]] = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "native": {},
}
# What the compiler is given behind kvsieve's own options.
COMPILED = {"avx2": "-march=haswell", "avx512": "-mno-avx512bf16", "avx512_bf16": "-mno-amx-tile", "native": ""}
KINDS = (AVX2, AVX512, AVX512_BF16, AMX, ARM_BF16)
BASELINE = "transformers"


def measure(tokens: int, rounds: int, new_tokens: int, dtype: str = "auto") -> dict[str, Any]:
    """Measure in this process, on the kind of CPU that it is held to."""
    chosen = auto_dtype("cpu") if dtype == "auto" else DtypeChoice(getattr(torch, dtype), "as asked for")
    model, tokenizer = kvsieve.models.load_demo(chosen.dtype)
    prompt = TokensPrompt(text_ids(tokenizer)[:, :tokens])
    full = kvsieve.plan("full")
    contenders: list[Contender] = [
        Transformers(model),
        KvsieveMethod(model, full, "full"),
        KvsieveMethod(model, full, f"full, chunks of {CHUNK}", CHUNK),
    ]
    runs: dict[str, list[dict[str, float]]] = {each.name: [] for each in contenders}
    short = TokensPrompt(prompt.ids[:, :256])
    for each in contenders:
        each.run(short, 2)
    for turn in range(rounds):
        at = turn % len(contenders)
        for each in contenders[at:] + contenders[:at]:
            began = time.process_time()
            run = each.run(prompt, new_tokens)
            spent = time.process_time() - began
            runs[each.name].append({"ttft_s": run["ttft_s"], "tpot_s": run["tpot_s"], "processor_s": spent})
    found: dict[str, Any] = {
        "kind": cpu_kind(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "dtype": f"{chosen.name}: {chosen.reason}",
        "attention": str(cpu_paths(chosen.dtype)),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "contenders": {},
    }
    for name, mine in runs.items():
        row: dict[str, Any] = {}
        for metric in ("ttft_s", "tpot_s", "processor_s"):
            ratios = [a[metric] / b[metric] for a, b in zip(mine, runs[BASELINE], strict=True)]
            row[metric] = round(statistics.median(run[metric] for run in mine), 4)
            row[f"{metric}_ratio"] = round(statistics.median(ratios), 3)
            row[f"{metric}_ratios"] = [round(ratio, 3) for ratio in ratios]
        found["contenders"][name] = row
    return found


def held_to(name: str) -> dict[str, str]:
    """Return the environment of a process that is held to a kind."""
    # Of a fixed name, so that kernels are compiled once.
    compiler = Path(tempfile.gettempdir()) / f"kvsieve-cc-{name}"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "gcc")} "$@" {COMPILED[name]}\n')
    compiler.chmod(0o755)
    return os.environ | HELD[name] | {"CC": str(compiler)}


def in_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run this script in a process that is held to a kind."""
    command = [sys.executable, __file__, "--alone", "--tokens", str(given.tokens), "--rounds", str(given.rounds)]
    done = subprocess.run(
        [*command, "--new-tokens", str(given.new_tokens), "--dtype", given.dtype],
        env=held_to(name),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {"held_to": HELD[name], "compiled": COMPILED[name], **json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default="avx2,avx512,native", help=f"of {', '.join(HELD)}")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="a row of its own")
    parser.add_argument("--alone", action="store_true", help="measure in this process and print")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "cpu_kinds.json")
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(measure(given.tokens, given.rounds, given.new_tokens, given.dtype)))
        return
    # Kinds that were measured by an earlier call with the same settings stay.
    settings = {"tokens": given.tokens, "rounds": given.rounds, "new_tokens": given.new_tokens}
    known = json.loads(given.out.read_text()) if given.out.exists() else {}
    same = known.get("settings") == settings
    report: dict[str, Any] = {
        "settings": settings,
        "model": "SmolLM2-135M-Instruct",
        "kinds": known["kinds"] if same else dict.fromkeys(KINDS, "not measured"),
    }
    for name in given.kinds.split(","):
        row = in_process(name, given)
        kind = row["kind"] if given.dtype == "auto" else f"{row['kind']}, {given.dtype}"
        report["kinds"][kind] = {"environment": environment(), **row}
        print(kind, json.dumps(row["contenders"], indent=1))
        write_result(given.out, report)


if __name__ == "__main__":
    main()
