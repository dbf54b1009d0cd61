"""The benchmark of the kernels: its comparison finds what is wrong, its numbers add up, and it wants a GPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.kernels import measure as bench
from interpreted import interpreted
from kvsieve import kernels

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "kernels" / "gpu_kernels.py")
CPU = torch.device("cpu")
# Kernels are defined when their modules are first imported.
with interpreted():
    pass


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted():
        yield


@pytest.mark.filterwarnings("ignore:overflow")
def test_the_comparison_passes_and_fails(monkeypatch):
    monkeypatch.setattr(kernels, "dtypes", lambda: (torch.bfloat16,))
    small = bench.small
    # Wide heads take the interpreter long.
    monkeypatch.setattr(bench, "small", lambda shape: small(shape) if shape.dim == 40 else [])
    rows = bench.check(CPU)
    assert len(rows) == 11 and all(row["passes"] for row in rows)
    # A kernel that is wrong is told from one beside it that is not.
    monkeypatch.setattr(bench, "small", lambda shape: [each for each in small(shape) if "page scores" in each.name])
    monkeypatch.setattr(kernels, "page_bounds", lambda table, query: torch.zeros(()))
    found = {(row["kernel"], row["passes"]) for row in bench.check(CPU)}
    assert found == {("page scores, HSA", True), ("page scores, Quest", False)}


@pytest.mark.filterwarnings("ignore:overflow")
def test_rates_are_shares_of_the_copys(monkeypatch):
    """Everything but the clock and the GPU."""
    taken = iter([0.5, 2.0, 8.0, 2.0, 8.0, 40.0, 2.0, 8.0, 5.0])
    chosen = ("page scores, Quest", "window mass", "prompt, chosen blocks")
    monkeypatch.setattr(bench, "_milliseconds", lambda runs: [run() for run in runs] and next(taken))
    monkeypatch.setattr(bench, "_copy_rate", lambda device: 1e6 * next(taken))
    monkeypatch.setattr(bench, "LLAMA", {"heads": 2, "groups": 2, "dim": 16})
    small = bench.small
    monkeypatch.setattr(bench, "large", lambda shape: [each for each in small(shape) if each.name in chosen])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1 << 12))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    report = bench.measure(CPU)
    assert report["copy_gb_per_s"] == 0.5 and [row["kernel"] for row in report["rows"]] == [*chosen]
    for row in report["rows"]:
        assert (row["inputs"] - 1) * row["bytes"] < 1 << 14 <= row["inputs"] * row["bytes"]
        assert row["share_of_copy"] == row["bytes"] / 2.0 / 5e5
    assert [row["share_of_layer"] for row in report["rows"] if row["kernel"] == "window mass"] == [2.0 / 40.0]
    assert [row["share_of_full"] for row in report["rows"] if "share_of_full" in row] == [2.0 / 5.0]


def test_what_is_measured_was_compared():
    shape = bench.Shape(2, 2, 16, CPU, torch.float32)
    assert {task.name for task in bench.large(shape)} == {task.name for task in bench.small(shape)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(SCRIPT, run_name="__main__")
    assert str(refused.value) == "nothing measured: kernels run on CUDA devices, not on cpu; --check needs no GPU"
