"""Which path attention takes on a processor: by the table, by measuring, and by what was measured before."""

from __future__ import annotations

import json
import tempfile

import pytest
import torch

from kvsieve.attention import choice
from kvsieve.devices import AMX, ARM, AVX2, AVX512, AVX512_BF16


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which nothing was measured yet."""
    monkeypatch.delenv("KVSIEVE_ATTENTION")
    monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    choice._paths.cache_clear()
    yield tmp_path / "kernels"
    choice._paths.cache_clear()


def test_the_table_leaves_torchs_kernel_on_one_kind_only():
    assert choice.table(AVX512_BF16, torch.bfloat16) == choice.CpuPaths(True, choice.LONG)
    for kind in (AMX, ARM, AVX2, AVX512):
        assert choice.table(kind, torch.bfloat16) == choice.CpuPaths(False, None)
    assert choice.table(AVX512_BF16, torch.float32) == choice.CpuPaths(False, None)


@pytest.mark.parametrize(
    ("products", "ratio", "then"),
    [(True, 0.6, True), (True, 1.08, True), (True, 1.2, False), (False, 0.95, False), (False, 0.8, True)],
)
def test_only_a_clear_difference_changes_the_tables_path(products, ratio, then):
    known = choice.CpuPaths(products, choice.LONG if products else None)
    for prompt, token in ((ratio, 1.0), (1.0, ratio)):
        found = choice.decide(known, {"prompt": [prompt] * 3, "token": [token] * 3})
        changed = found.prompt_products if prompt == ratio else found.token_products_from is not None
        other = found.token_products_from is not None if prompt == ratio else found.prompt_products
        assert (changed, other) == (then, products) and found.source == "measured"


def test_a_round_that_was_disturbed_changes_nothing():
    for products in (True, False):
        known = choice.CpuPaths(products, choice.LONG if products else None)
        rounds = [3.0, 3.0, 0.8] if products else [0.3, 0.3, 1.2]
        found = choice.decide(known, {"prompt": rounds, "token": rounds})
        assert (found.prompt_products, found.token_products_from is not None) == (products, products)


def test_measured_once_per_machine(machine, monkeypatch):
    runs = []
    monkeypatch.setattr(choice, "measured", lambda dtype: runs.append(dtype) or {"prompt": [0.5], "token": [2.0]})
    first = choice.cpu_paths(torch.float32)
    assert first.prompt_products and first.token_products_from is None and first.source == "measured"
    assert choice.cpu_paths(torch.float32) is first
    choice._paths.cache_clear()  # another process
    again = choice.cpu_paths(torch.float32)
    assert again.source == "measured before" and again.prompt_products and again.prompt_ratio == 0.5
    assert choice.faster_here(torch.zeros(1)) and not choice.faster_for_token(torch.zeros(1), 5000)
    choice.cpu_paths(torch.float16)
    assert runs == [torch.float32, torch.float16]
    # A file that is damaged, or of another version, is measured again.
    for file in machine.iterdir():
        file.write_text(json.dumps({"paths": {"other": 1}}))
    choice._paths.cache_clear()
    assert choice.cpu_paths(torch.float32).source == "measured" and len(runs) == 3


@pytest.mark.parametrize(("other", "source"), [(0o700, "measured before"), (0o777, "measured")])
def test_a_folder_that_cannot_be_written(machine, monkeypatch, other, source):
    """It is measured once where temporary files are private, and else in each process."""
    monkeypatch.setenv("KVSIEVE_CACHE", "/dev/null/nowhere")
    (machine.parent / "tmp").chmod(other)
    monkeypatch.setattr(choice, "measured", lambda dtype: {"prompt": [1.0], "token": [1.0]})
    assert choice.cpu_paths(torch.float32).source == "measured"
    choice._paths.cache_clear()
    assert choice.cpu_paths(torch.float32).source == source


def test_what_is_measured(monkeypatch):
    monkeypatch.setattr(choice, "_ROUNDS", 1)
    assert all(ratios[0] > 0 for ratios in choice.measured(torch.float32).values())


def test_told():
    assert str(choice.CpuPaths(False, None)) == "prompts by torch's kernel, tokens by torch's kernel (table)"
    told = str(choice.CpuPaths(True, 1024, "measured", 0.6, 0.71))
    assert told == (
        "prompts by products, tokens by products from 1024 entries on "
        "(measured: products take 0.60 and 0.71 of torch's kernel's time)"
    )
