"""The demo's time to the first token beside transformers', in each dtype: what `kvsieve demo` costs with full KV.

    python benchmarks/first_token.py [--dtypes float32,bfloat16] [--tokens 5000] [--rounds 5] [--out FILE]

Full KV reads the demo's prompt as the demo does, in chunks of 1024 tokens; transformers reads it with its own cache and
sdpa, at once and in such chunks, and is judged by the faster of the two. All take turns on the same model object; told
are medians of the rounds and of the ratios within a round. Beside the seconds to the first token stand the processor's
seconds of reading and one more token, which other work on the machine disturbs less. A processor without bfloat16 is
imitated by the environment ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2, which is
noted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import kvsieve
from kvsieve.bench.contenders import KvsieveMethod, Transformers
from kvsieve.bench.prompts import TokensPrompt
from kvsieve.cli.answers import encode
from kvsieve.cli.demo import CHUNK
from kvsieve.cli.document import QUESTION, build_document
from kvsieve.cli.prompts import TextPrompt
from kvsieve.devices import auto_dtype
from kvsieve.report.environment import environment

HELD = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
OURS, BASELINES = "kvsieve, full KV", ("transformers, at once", "transformers, in chunks")


def measure(dtype: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds to the first token of each contender, and ours over the faster baseline's within each round."""
    model, tokenizer = kvsieve.models.load_demo(getattr(torch, dtype))
    asked = encode(tokenizer, TextPrompt(f"{build_document(tokenizer, tokens, 0.5)}\n\n{QUESTION}"))
    prompt = TokensPrompt(asked.ids)
    contenders = {
        OURS: KvsieveMethod(model, kvsieve.plan("full"), OURS, CHUNK),
        BASELINES[0]: Transformers(model),
        BASELINES[1]: Transformers(model, CHUNK),
    }
    spent: dict[str, list[float]] = {name: [] for name in contenders}
    worked: dict[str, list[float]] = {name: [] for name in contenders}
    load = []
    for turn in range(rounds + 1):
        names = list(contenders)
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            began = time.process_time()
            seconds = contenders[name].run(prompt, 2)["ttft_s"]
            if turn:
                spent[name].append(seconds)
                worked[name].append(time.process_time() - began)
                load.append(os.getloadavg()[0])
    return {
        "prompt_tokens": asked.ids.shape[1],
        "ttft_s": summary(spent),
        "processor_s": summary(worked),
        "load_average": round(statistics.median(load), 2),
    }


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and ours over those of the faster baseline."""
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    best = min(BASELINES, key=medians.__getitem__)
    ratios = [ours / theirs for ours, theirs in zip(seconds[OURS], seconds[best], strict=True)]
    return {
        **{name: round(each, 3) for name, each in medians.items()},
        "baseline": best,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "first_token.json")
    given = parser.parse_args()
    choice = auto_dtype("cpu")
    report: dict[str, Any] = {
        "environment": environment(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "held_to": {name: os.environ[name] for name in HELD if name in os.environ},
        "auto": f"{choice.name}: {choice.reason}",
        "chunk": CHUNK,
        "rounds": given.rounds,
        "dtypes": {},
    }
    for dtype in given.dtypes.split(","):
        report["dtypes"][dtype] = measure(dtype, given.tokens, given.rounds)
        print(dtype, json.dumps(report["dtypes"][dtype]))
    given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
