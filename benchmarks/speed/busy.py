"""Times beside another program that keeps one core busy, as a multiple of those on an idle machine.

    python benchmarks/speed/busy.py MODEL [--tokens 2048] [--new-tokens 32] [--rounds 5] [--openvino-python PYTHON
        --openvino-model FOLDER] [--out FILE]

In every round each contender reads and answers one prompt while nothing else runs, and then while a process of its own
counts in a loop. The result has the medians of both, and of their ratio within a round. kvsieve and transformers run
here, OpenVINO GenAI in its own interpreter (`pip install openvino-genai`), on a folder of its model files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import kvsieve
from kvsieve.lab.bench.contenders import KvsieveMethod, Transformers
from kvsieve.lab.bench.prompts import TokensPrompt, text_ids
from kvsieve.planning.named import plan_without_floor
from kvsieve.report.environment import environment, write_result

BUSY = "while True: pass"
OPENVINO = """
import json, sys, time
import numpy, openvino, openvino_genai as genai
plan = genai.SchedulerConfig()
plan.cache_size, plan.max_num_batched_tokens, plan.enable_prefix_caching = 2, 8192, False
pipe = genai.LLMPipeline(sys.argv[1], "CPU", scheduler_config=plan, INFERENCE_NUM_THREADS=int(sys.argv[2]))
for line in sys.stdin:
    asked, times = json.loads(line), []
    rule = genai.GenerationConfig(max_new_tokens=asked["tokens"], do_sample=False, ignore_eos=True)
    def streamed(part):
        times.append(time.perf_counter())
        return genai.StreamingStatus.RUNNING
    began = time.perf_counter()
    pipe.generate(openvino.Tensor(numpy.array([asked["ids"]], dtype=numpy.int64)), rule, streamed)
    ended, made = time.perf_counter(), asked["tokens"] - 1
    print(json.dumps({"ttft_s": times[0] - began, "tpot_s": (ended - times[0]) / made}), flush=True)
"""


class OpenVINO:
    """OpenVINO GenAI in a process of its own."""

    name = "OpenVINO"

    def __init__(self, python: str, folder: str) -> None:
        command = [python, "-c", OPENVINO, folder, str(torch.get_num_threads())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, prompt: TokensPrompt, new_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"ids": prompt.ids[0].tolist(), "tokens": new_tokens}), file=self._process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep a core busy for the block."""
    other = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--openvino-python")
    parser.add_argument("--openvino-model")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "busy.json")
    given = parser.parse_args()
    model, tokenizer = kvsieve.models.load(given.model, device="cpu")
    text = text_ids(tokenizer)
    contenders: list[Any] = [KvsieveMethod(model, plan_without_floor("full"), "kvsieve"), Transformers(model)]
    if given.openvino_python:
        contenders.append(OpenVINO(given.openvino_python, given.openvino_model))
    found: dict[str, Any] = {one.name: {"idle": [], "busy": []} for one in contenders}
    for one in contenders:
        one.run(TokensPrompt(text[:, : given.tokens]), given.new_tokens)
    for number in range(given.rounds):
        prompt = TokensPrompt(text[:, number * given.tokens :][:, : given.tokens])
        for one in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
            for state, block in (("idle", contextlib.nullcontext()), ("busy", busy_core())):
                with block:
                    run = one.run(prompt, given.new_tokens)
                found[one.name][state].append({name: run[name] for name in ("ttft_s", "tpot_s")})
            print(number + 1, one.name, {state: each[-1] for state, each in found[one.name].items()}, flush=True)
    for each in found.values():
        for name in ("ttft_s", "tpot_s"):
            idle, busy = ([run[name] for run in each[state]] for state in ("idle", "busy"))
            ratio = statistics.median(b / a for a, b in zip(idle, busy, strict=True))
            each[name] = {"idle": statistics.median(idle), "busy": statistics.median(busy), "ratio": round(ratio, 3)}
    settings = {"model": Path(given.model).name, "tokens": given.tokens}
    settings |= {"new_tokens": given.new_tokens, "rounds": given.rounds}
    threads = torch.get_num_threads()
    write_result(given.out, {"environment": environment(model), "threads": threads, **settings, "contenders": found})
    print(json.dumps({name: {part: each[part] for part in ("ttft_s", "tpot_s")} for name, each in found.items()}))


if __name__ == "__main__":
    main()
