"""benchmarks/speed/gpu.py, tried on the CPU with its tiny geometry."""

from __future__ import annotations

import json
import runpy
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch

from benchmarks.speed import gpu as script
from forked import forked
from kvsieve.lab.bench.geometry import geometry
from kvsieve.lab.bench.prompts import TokensPrompt
from kvsieve.lab.bench.roofline import Rates
from kvsieve.lab.bench.work import Work

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2] / "benchmarks"
GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(script, "measure_rates", lambda model: Rates(1e9, 1e10))
    return script


@pytest.fixture
def call(gpu, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, arguments)])
        gpu.main()
        return capsys.readouterr().out

    return run


def test_cells_are_measured_once_and_summed_up(gpu, call, tmp_path):
    out = tmp_path / "gpu.json"
    tiny = ("--tiny", "--out", out, "--batches", "2")
    call(*tiny, "--contexts", "256", "--cells", "transformers,nothing else")
    first = json.loads(out.read_text())
    assert list(first["cells"]) == ["256/2/transformers", "256/2/transformers generate"]
    printed = call(*tiny, "--contexts", "256,384")
    report = json.loads(out.read_text())
    assert report["cells"]["256/2/transformers"] == first["cells"]["256/2/transformers"]
    assert len(report["cells"]) == 2 * len(report["contenders"]) == 22
    assert all("env" in cell and len(cell["samples"]) == 1 for cell in report["cells"].values())
    summary = report["summary"]["2"]["384"]
    assert list(summary) == list(report["contenders"])
    assert all(row["applied"] for row in summary.values()), {name: row["notes"] for name, row in summary.items()}
    tokens = {name.partition(":")[0]: row["layer_tokens"] for name, row in summary.items()}
    assert tokens["fastkv"] == [384, 76] and tokens["gemfilter"] == [424, 40]
    samples = {name: report["cells"][f"384/2/{name}"]["samples"][0]["alone"][0] for name in ("full", "transformers")}
    ratio = samples["full"]["ttft_s"] / samples["transformers"]["ttft_s"]
    assert summary["full"]["ratios"]["transformers"]["ttft_s"]["median"] == pytest.approx(ratio)
    assert summary["full"]["decode_tokens_per_s"]["median"] == pytest.approx(2 / samples["full"]["tpot_s"])
    assert "batch 2: 384 tokens" in printed and "growth" in printed
    assert call("--show", out) == printed


def test_the_time_guard_stops_before_a_cell(call, tmp_path):
    out = tmp_path / "gpu.json"
    printed = call("--tiny", "--out", out, "--minutes", 0)
    assert "stopped after 0 minutes, before 256/1/transformers" in printed and not out.exists()


def test_a_file_of_other_settings_is_not_mixed(call, tmp_path):
    out = tmp_path / "gpu.json"
    call("--tiny", "--out", out, "--contexts", "64", "--cells", "64/1/transformers")
    with pytest.raises(SystemExit, match="was measured with another new_tokens"):
        call("--tiny", "--out", out, "--new-tokens", 5)


def test_without_a_gpu_it_says_so(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="^error: benchmarks/speed/gpu.py needs a CUDA device") as left:
        call()
    assert left.value.code != 0


def test_running_out_of_memory_is_a_reason(gpu, monkeypatch):
    def full(*arguments, **options):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")

    monkeypatch.setattr(gpu, "run_length", full)
    model = gpu.build(gpu.TINY, "cpu")
    settings = {"config": gpu.TINY, "new_tokens": 4, "rounds": 1, "decode": "auto"}
    got = gpu.measure_cell(model, gpu.Cell(64, 1, "transformers"), None, None, settings)
    assert got == {"skipped": "out of memory: CUDA out of memory. Tried", "chunk": None}


@pytest.mark.parametrize("chunk", (None, 64))
def test_generate_is_measured_as_the_loop_is(gpu, chunk):
    model, ids, found = gpu.build(gpu.TINY, "cpu"), torch.randint(3, 100, (2, 150)), {}
    for contender in (gpu.Generate(model, chunk), gpu.Transformers(model, chunk)):
        work = Work(model, geometry(model.config), 150, 2)
        work.start()
        run = contender.run(TokensPrompt(ids), 6, work)
        found[contender.name] = (work.to_dict(), run["kv_bytes"], run["kv_read_bytes"], run["rows"])
    assert found["transformers"] == found[gpu.GENERATE] and found["transformers"][0]["layer_tokens"] == [150] * 2


@pytest.mark.parametrize(
    "context, batch, expected",
    ((8192, 8, None), (131072, 1, None), (131072, 4, 16384), (131072, 8, "the device has 140 GiB")),
)
def test_prompts_are_read_in_the_largest_chunk_that_fits(gpu, context, batch, expected):
    with torch.device("meta"):
        found = geometry(gpu.LlamaConfig(**gpu.LLAMA))
    assert found.parameters == 8_030_261_248
    settings, cell = {"config": gpu.LLAMA, "new_tokens": 256}, gpu.Cell(context, batch, "transformers")
    chunk, reason = gpu.choose_chunk(lambda each: gpu.bytes_needed(found, settings, cell, each, None), 140 * GIB)
    assert (reason or "").endswith(str(expected)) if isinstance(expected, str) else (chunk, reason) == (expected, None)


def start(tell, script):
    """Run a script as Python does: its folder comes first among those that modules are looked for in."""
    sys.path = [str(script.parent), *(place for place in sys.path if place != str(ROOT.parent))]
    sys.argv = [script.name]
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as refused:
        tell(str(refused))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the scripts ask for")
@pytest.mark.parametrize("name", ["speed/gpu.py", "kernels/gpu_kernels.py"])
def test_a_script_starts_and_says_what_is_missing(name):
    with forked(start, ROOT / name) as (_, heard):
        assert "CUDA" in heard.recv()
    # What is imported after it starts is not one of its neighbours.
    neighbours = {script.stem for script in (ROOT / name).parent.glob("*.py")}
    assert not neighbours & {*sys.stdlib_module_names, *packages_distributions()}
