"""Peak memory while a prompt is read, each contender in a fresh process: what comes on top of the loaded model.

    python benchmarks/speed/peak_memory.py [MODEL] [--tokens 7500] [--cases transformers,full,snapkv] [--chunk 1024]
        [--decode eager] [--runs 3]
    python benchmarks/speed/peak_memory.py [MODEL] [--tokens 7500] --limits 1GiB,2GiB

A process that has measured something else holds freed memory, compiled products of other shapes and copies of weights,
so each case has one of its own. The model is loaded and every weight read, freed memory is returned, and what is
resident then is taken from the resident peak of reading the prompt and generating two tokens. `transformers` is its own
cache; any other case is a method of kvsieve, at 10% where it has a budget, and `NAME/chunked` reads it in chunks.
`allowed_bytes` is the final KV, one layer's KV of the whole prompt, and half a GiB. Every case is measured in several
processes, since peaks of the same case differ: reported are medians, and the addition in each run.

With `--limits`, `kvsieve run --memory LIMIT --method full` reads so many tokens instead: recorded are what it chose or
why it refused, and the resident peak of its whole process beside the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import kvsieve
from kvsieve.attention.choice import cpu_paths
from kvsieve.devices import cpu_kind
from kvsieve.hf.decode.engines import ENGINES
from kvsieve.hf.generate.peak_memory import measure_peak
from kvsieve.lab.bench.contenders import Contender, KvsieveMethod, Transformers
from kvsieve.lab.bench.prompts import TokensPrompt, text_ids
from kvsieve.models import load_tokenizer
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.quantities import parse_bytes
from kvsieve.report.environment import environment, write_result

HALF_GIB = 2**29
CHUNKED = "/chunked"


def contender(model: Any, case: str, chunk: int, decode: str) -> Contender:
    """Make the contender of a case."""
    name, chunked = case.removesuffix(CHUNKED), chunk if case.endswith(CHUNKED) else None
    if name == "transformers":
        return Transformers(model, chunked)
    plan = plan_without_floor(name) if name == "full" else plan_without_floor(name, budget="10%")
    return KvsieveMethod(model, plan, case, chunked, decode)


def measure(name: str | None, case: str, tokens: int, chunk: int, decode: str) -> dict[str, Any]:
    """Measure one case in this process."""
    model, tokenizer = kvsieve.models.load(name, device="cpu")
    weights = {weight.data_ptr(): weight for weight in model.parameters()}.values()
    for weight in weights:
        weight.sum()
    cpu_paths(model.dtype)
    prompt = TokensPrompt(text_ids(tokenizer)[:, :tokens])
    del tokenizer
    with measure_peak(model.device) as before:
        pass
    run = contender(model, case, chunk, decode).run(prompt, 2)
    assert before.bytes is not None and run["peak_bytes"] is not None, "peak memory is only known on Linux"
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer = 2 * config.num_key_value_heads * head * prompt.ids.shape[1] * weight.element_size()
    return {
        "tokens": prompt.ids.shape[1],
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_bytes": sum(weight.nbytes for weight in weights),
        "before_bytes": before.bytes,
        "peak_bytes": run["peak_bytes"],
        "added_bytes": run["peak_bytes"] - before.bytes,
        "kv_final_bytes": run["kv_bytes"],
        "kv_layer_bytes": layer,
        "allowed_bytes": run["kv_bytes"] + layer + HALF_GIB,
        "ttft_s": round(run["ttft_s"], 1),
    }


def run_below(name: str | None, prompt: Path, limit: str) -> dict[str, Any]:
    """Run the command under a limit; what it said, and the peak of its process."""
    named = [] if name is None else [name]
    command = [sys.executable, "-m", "kvsieve", "run", *named, "--prompt-file", str(prompt), "--method", "full"]
    command += ["--max-new-tokens", "8", "--memory", limit, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        out, said = process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    row = {"limit_bytes": parse_bytes(limit), "said": next(iter(said.splitlines()), ""), "code": process.returncode}
    if process.returncode == 0:
        stats = json.loads(out)["results"][0]["stats"]
        row |= {"tokens": stats["prompt_tokens"], "peak_bytes": usage.ru_maxrss * 1024, "ttft_s": stats["ttft_s"]}
        row["below"] = row["peak_bytes"] <= row["limit_bytes"]
    return row


def below_limits(name: str | None, tokens: int, limits: list[str]) -> dict[str, Any]:
    """Rows of `run_below` by limit."""
    tokenizer = load_tokenizer(name)
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        prompt.write_text(tokenizer.decode(text_ids(tokenizer)[0, :tokens]))
        return {limit: run_below(name, prompt, limit) for limit in limits}


def median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several: medians of numbers, and every run's added bytes."""
    row: dict[str, Any] = dict(runs[0])
    for name, first in row.items():
        if isinstance(first, int | float):
            row[name] = statistics.median_low(run[name] for run in runs)
    return row | {"added_bytes_runs": sorted(run["added_bytes"] for run in runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="directory or hub id; the demo model if left out")
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--cases", default="transformers,full,snapkv,snapkv/chunked")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--decode", default="auto", choices=ENGINES, help="of kvsieve")
    parser.add_argument("--runs", type=int, default=3, help="processes for each case")
    parser.add_argument("--alone", action="store_true", help="measure the one case in this process and print")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "peak_memory.json")
    parser.add_argument("--limits", help="sizes of --memory, instead of cases")
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(measure(given.model, given.cases, given.tokens, given.chunk, given.decode)))
        return
    report = json.loads(given.out.read_text()) if given.out.exists() else {}
    model = "SmolLM2-135M-Instruct" if given.model is None else Path(given.model).name
    if given.limits:
        rows = below_limits(given.model, given.tokens, given.limits.split(","))
        cell = {"environment": environment(given.model), "kind": cpu_kind(), "runs": rows}
        report.setdefault(model, {}).setdefault(str(given.tokens), {})["--memory"] = cell
        write_result(given.out, report)
        print(json.dumps(rows, indent=1))
        return
    for case in given.cases.split(","):
        named = [] if given.model is None else [given.model]
        options = ["--alone", "--tokens", str(given.tokens), "--cases", case, "--chunk", str(given.chunk)]
        options += ["--decode", given.decode]
        command = [sys.executable, __file__, *named, *options]
        row = median_of(
            [
                json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
                for _ in range(given.runs)
            ]
        )
        cell = {"environment": environment(given.model), "kind": cpu_kind(), "chunk": given.chunk, **row}
        called = case if given.decode == "auto" else f"{case}, {given.decode}"
        report.setdefault(model, {}).setdefault(str(given.tokens), {})[called] = cell
        write_result(given.out, report)
        mib = {key: round(value / 2**20) for key, value in row.items() if key.endswith("_bytes")}
        mib["runs"] = [round(value / 2**20) for value in row["added_bytes_runs"]]
        print(model, given.tokens, case, mib, flush=True)


if __name__ == "__main__":
    main()
