"""A GGUF file in blocks beside its expanded checkpoint and llama.cpp: times, memory, on the same prompts and threads.

    python benchmarks/speed/weights.py FILE.gguf --checkpoint DIR [--llama-python PYTHON] [--llama-wheel-python PYTHON]
        [--as Q8_0] [--lengths 1024,4096,7900] [--new-tokens 64] [--rounds 3] [--threads 2] [--chunk N] [--out FILE]

Engines: "bfloat16" is kvsieve on the checkpoint, "blocks" is kvsieve on the file, "llama.cpp" is llama.cpp on the file,
compiled for this processor, and "llama.cpp, wheel" a build for all processors (llama_worker.py says which interpreters
have them). KV is full, of 16 bits a number. Every engine has a process of its own and waits while another one runs. In
every round each answers the same prompt, in another order; the result has the rounds, medians, and medians of ratios
within a round. llama.cpp runs with the fastest of four settings (flash attention on or off, 512 or 2,048 tokens at a
time), which are found first and recorded.

Memory is measured apart from times, each prompt in a fresh process: the resident peak, its private part, and its part
of mapped files (libraries, and weights in blocks). With --as, the file's weights are quantized to another type first.
Rounds, memory and settings that the result has are not measured again, so a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import kvsieve
from benchmarks.gguf_files import converted, described_file
from kvsieve.hf.generate.peak_memory import resident
from kvsieve.lab.bench.prompts import text_ids
from kvsieve.models import load_tokenizer
from kvsieve.models.quantized import QuantizedLinear, weight_bytes
from kvsieve.planning.named import plan_without_floor
from kvsieve.report.environment import environment, weights_digest, write_result
from kvsieve.report.tables import markdown_table

RESULTS = Path(__file__).parents[1] / "results" / "weights_speed.json"
LLAMA_WORKER = Path(__file__).with_name("llama_worker.py")
BFLOAT16, BLOCKS, LLAMA, LLAMA_WHEEL = "bfloat16", "blocks", "llama.cpp", "llama.cpp, wheel"
SETTINGS = [(flash, ubatch) for flash in (1, 0) for ubatch in (512, 2048)]
# Tokens of a first prompt that does not count.
WARM = 256
# Most wanted of the ratios of `blocks` to another engine.
OF_LLAMA = {"tpot_s": 0.6, "peak_bytes": 1.1}
WANTED = {BFLOAT16: {"ttft_s": 1.05, "tpot_s": 0.65}, LLAMA: OF_LLAMA, LLAMA_WHEEL: OF_LLAMA}


def work(name: str, chunk: int | None) -> None:
    """Answer prompts, one JSON object a line; the first line of output describes the process."""
    process = resident()
    model, _ = kvsieve.models.load(name, torch.bfloat16, "cpu")
    in_blocks = any(isinstance(part, QuantizedLinear) for part in model.modules())
    if in_blocks != name.endswith(".gguf"):
        sys.exit(f"error: {name} was loaded {'in' if in_blocks else 'without'} blocks")
    hello = {"build": f"kvsieve {kvsieve.__version__}", "process_bytes": process, "weight_bytes": weight_bytes(model)}
    print(json.dumps(hello), flush=True)
    with kvsieve.attach(model, plan_without_floor("full")) as sieve:
        for line in sys.stdin:
            request = json.loads(line)
            count = request["new_tokens"]
            options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "chunk": chunk}
            stats = sieve.generate(torch.tensor([request["ids"]]), **options).stats
            row = {"ttft_s": stats.ttft_s, "tpot_s": stats.tpot_s, "kv_bytes": stats.kv_bytes}
            print(json.dumps(row), flush=True)


class Worker:
    """A process that has a model loaded and answers prompts.

    Args:
        command: of the process.
        threads: that it computes with.
    """

    def __init__(self, command: list[str], threads: int) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
        )
        self.hello = self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        sys.exit(f"error: {' '.join(self._process.args)} ended with code {self._process.wait()}")

    def answer(self, ids: list[int], new_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        return self._line()

    def weighed(self, ids: list[int], new_tokens: int, file: str) -> dict[str, Any]:
        """Answer a prompt, and return the memory of the process in bytes. file: of weights that may be mapped."""
        peaks = {"private_bytes": 0, "mapped_bytes": 0}
        done = threading.Event()

        def look() -> None:
            status = status_of(self._process.pid)
            peaks["private_bytes"] = max(peaks["private_bytes"], status["RssAnon"] + status["RssShmem"])
            peaks["mapped_bytes"] = max(peaks["mapped_bytes"], status["RssFile"])

        def watch() -> None:
            while not done.wait(0.02):
                look()

        watcher = threading.Thread(target=watch)
        watcher.start()
        row = self.answer(ids, new_tokens)
        done.set()
        watcher.join()
        look()
        status = status_of(self._process.pid)
        memory = {"peak_bytes": status["VmHWM"], **peaks, "file_bytes": mapped(self._process.pid, file)}
        return {**memory, "kv_bytes": row.get("kv_bytes"), **self.hello}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def status_of(process: int) -> dict[str, int]:
    """Return the bytes in /proc/PID/status by their names."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    pairs = (line.partition(":")[::2] for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def mapped(process: int, file: str) -> int:
    """Return the resident bytes of a file that a process has mapped."""
    total = 0
    ours = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if not name.isalpha() and " " in name:
            ours = line.endswith(file)
        elif ours and name == "Rss":
            total += int(value.split()[0]) * 1024
    return total


class Engines:
    """Commands of all engines for one file.

    Attributes:
        names: of all, in the order of the result.
        settings: of llama.cpp: flash attention and tokens at a time.
    """

    def __init__(self, arguments: argparse.Namespace, file: Path) -> None:
        self.arguments = arguments
        self.file = file
        found = {LLAMA: arguments.llama_python, LLAMA_WHEEL: arguments.llama_wheel_python}
        self.llama = {name: python for name, python in found.items() if python is not None}
        self.names = [BFLOAT16, BLOCKS, *self.llama]
        self.settings: dict[str, tuple[int, int]] = dict.fromkeys(self.llama, SETTINGS[0])

    def start(self, name: str, tokens: int) -> Worker:
        """Start an engine for prompts of so many tokens."""
        arguments = self.arguments
        if name in self.llama:
            flash, ubatch = self.settings[name]
            # llama.cpp pads its cache to 256 tokens.
            context = -(-(tokens + arguments.new_tokens) // 256) * 256
            command = [self.llama[name], str(LLAMA_WORKER), str(self.file), "--context", str(context)]
            command += ["--threads", str(arguments.threads), "--flash", str(flash), "--ubatch", str(ubatch)]
        else:
            model = self.file if name == BLOCKS else arguments.checkpoint
            command = [sys.executable, __file__, str(model), "--work"]
            command += [] if arguments.chunk is None else ["--chunk", str(arguments.chunk)]
        return Worker(command, arguments.threads)


class Report:
    """The result of all files, which is written after every measurement.

    Raises SystemExit if the file is of other settings.
    """

    def __init__(self, arguments: argparse.Namespace, file: Path) -> None:
        self.out: Path = arguments.out
        described = described_file(file)
        settings = {"model": arguments.checkpoint.name, "new_tokens": arguments.new_tokens}
        settings |= {"threads": arguments.threads, "chunk": arguments.chunk}
        self.all: dict[str, Any] = {**settings, "environments": [], "files": {}}
        if self.out.exists():
            self.all = json.loads(self.out.read_text())
            if any(self.all[key] != value for key, value in settings.items()):
                sys.exit(f"error: {self.out} has other settings; name another file with --out")
        self.all["environments"].append(environment(arguments.checkpoint))
        empty: dict[str, Any] = {"settings": {}, "rounds": {}, "memory": {}}
        self.of_file: dict[str, Any] = self.all["files"].setdefault(described["kind"], empty)
        self.of_file.update({"bytes": described["bytes"], "types": described["types"], "weights": weights_digest(file)})

    def write(self) -> None:
        self.of_file["summary"] = summary(self.of_file)
        write_result(self.out, self.all)


def summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per length and engine: medians of times, memory, and of both the ratios of `blocks` to it."""
    rows = []
    for length, rounds in found["rounds"].items():
        for name in rounds[0] if rounds else ():
            row: dict[str, Any] = {"tokens": int(length), "engine": name, "rounds": len(rounds)}
            for time in ("ttft_s", "tpot_s"):
                row[time] = round(statistics.median(each[name][time] for each in rounds), 5)
                ratios = [each[BLOCKS][time] / each[name][time] for each in rounds]
                row[f"{time}_blocks"] = round(statistics.median(ratios), 3)
            memory = found["memory"].get(length, {})
            if {name, BLOCKS} <= memory.keys():
                row["peak_bytes"] = memory[name]["peak_bytes"]
                row["peak_bytes_blocks"] = round(memory[BLOCKS]["peak_bytes"] / row["peak_bytes"], 3)
            rows.append(row)
    return rows


def choose_settings(engines: Engines, report: Report, ids: list[int]) -> None:
    """Find the fastest settings of each llama.cpp that the result does not know."""
    known = report.of_file["settings"]
    for name in engines.llama:
        if name not in known:
            tried = []
            for flash, ubatch in SETTINGS:
                engines.settings[name] = flash, ubatch
                worker = engines.start(name, len(ids))
                row = worker.answer(ids, engines.arguments.new_tokens)
                worker.close()
                seconds = row["ttft_s"] + row["tpot_s"] * engines.arguments.new_tokens
                tried.append({"flash": flash, "ubatch": ubatch, "seconds": round(seconds, 3), **row})
                print(name, tried[-1], flush=True)
            best = min(tried, key=lambda each: each["seconds"])
            known[name] = {**worker.hello, "tokens": len(ids), "tried": tried}
            known[name] |= {"flash": best["flash"], "ubatch": best["ubatch"]}
            report.write()
        engines.settings[name] = known[name]["flash"], known[name]["ubatch"]


def measure_times(engines: Engines, report: Report, text: torch.Tensor) -> None:
    arguments = engines.arguments
    rounds_of = report.of_file["rounds"]
    for length in arguments.lengths:
        # Rounds without one of the engines are measured again with all.
        known = rounds_of.get(str(length), [])
        rounds_of[str(length)] = [each for each in known if each.keys() >= set(engines.names)]
    if all(len(rounds_of[str(length)]) >= arguments.rounds for length in arguments.lengths):
        return
    workers = {name: engines.start(name, max(*arguments.lengths, WARM)) for name in engines.names}
    for worker in workers.values():
        worker.answer(prompt(text, WARM, 0), 8)
    for length in arguments.lengths:
        rounds = rounds_of[str(length)]
        while len(rounds) < arguments.rounds:
            first = len(rounds) % len(workers)
            order = engines.names[first:] + engines.names[:first]
            ids = prompt(text, length, len(rounds))
            row = {name: workers[name].answer(ids, arguments.new_tokens) for name in order}
            rounds.append({name: without_tokens(row[name]) for name in engines.names})
            report.write()
            print(length, json.dumps(rounds[-1]), flush=True)
    for worker in workers.values():
        worker.close()


def without_tokens(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("tokens", "text")}


def measure_memory(engines: Engines, report: Report, text: torch.Tensor) -> None:
    for length in engines.arguments.lengths:
        known = report.of_file["memory"].setdefault(str(length), {})
        for name in engines.names:
            if name not in known:
                worker = engines.start(name, length)
                known[name] = worker.weighed(prompt(text, length, 0), engines.arguments.new_tokens, engines.file.name)
                worker.close()
                report.write()
                print(length, name, json.dumps(known[name]), flush=True)


def prompt(text: torch.Tensor, length: int, number: int) -> list[int]:
    """Return the tokens of a prompt, another part of the text for every number."""
    start = random.Random(f"{length} {number}").randrange(text.shape[1] - length)
    return [int(each) for each in text[0, start : start + length]]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the summary as Markdown, with what is wanted of ratios."""
    cells = []
    for row in rows:
        wanted = WANTED.get(row["engine"], {})
        line = [str(row["tokens"]), row["engine"], f"{row['ttft_s']:.2f} s", f"{1000 * row['tpot_s']:.1f} ms"]
        line.append(f"{row['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in row else "")
        for name in ("ttft_s", "tpot_s", "peak_bytes"):
            ratio = row.get(f"{name}_blocks")
            most = f" (wanted: {wanted[name]})" if name in wanted else ""
            line.append("" if ratio is None or row["engine"] == BLOCKS else f"{ratio:.2f}{most}")
        cells.append(line)
    head = ["tokens", "engine", "first token", "each later", "peak"]
    head += [f"blocks to it: {each}" for each in ("first", "later", "peak")]
    return markdown_table(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="GGUF file")
    parser.add_argument("--checkpoint", type=Path, help="directory of the same model as a transformers checkpoint")
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python (default: none)")
    parser.add_argument("--llama-wheel-python", help="interpreter with xllamacpp (default: none)")
    parser.add_argument("--as", dest="kind", help="quantize the weights to this type first, such as Q8_0")
    parser.add_argument("--lengths", type=lambda text: [*map(int, text.split(","))], default=[1024, 4096, 7900])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--chunk", type=int, help="prompt tokens at a time in kvsieve (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(str(arguments.file), arguments.chunk)
        return
    if arguments.checkpoint is None:
        parser.error("--checkpoint names the directory of the checkpoint to compare with")
    file: Path = arguments.file.resolve()
    if arguments.kind is not None:
        source, file = file, file.with_name(f"{file.stem}-{arguments.kind.lower()}.gguf")
        if not file.exists():
            converted(source, file.with_suffix(".part"), arguments.kind).rename(file)
    engines = Engines(arguments, file)
    report = Report(arguments, file)
    text = text_ids(load_tokenizer(str(arguments.checkpoint)))
    choose_settings(engines, report, prompt(text, sorted(arguments.lengths)[len(arguments.lengths) // 2], 0))
    measure_times(engines, report, text)
    measure_memory(engines, report, text)
    print(table(report.of_file["summary"]))


if __name__ == "__main__":
    main()
