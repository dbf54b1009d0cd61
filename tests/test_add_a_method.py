"""The code of docs/add_a_method.md runs as it stands, and prints what the page says."""

from __future__ import annotations

import re
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

import kvsieve
from kvsieve.planning.roles import Evictor, Traits

PAGE = Path(__file__).parents[1] / "docs" / "add_a_method.md"


@pytest.fixture(scope="module")
def blocks():
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture
def module(monkeypatch):
    """A module of somebody's own; what it registers is forgotten afterwards."""
    kvsieve.list_methods()
    monkeypatch.setattr(kvsieve.planning.registry, "_METHODS", dict(kvsieve.planning.registry._METHODS))
    made = types.ModuleType("somebodys_own")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_the_page_runs_as_it_stands(blocks, module, capsys):
    wanted = []
    # The page's models have random weights: one answer in 128 would end with its first token.
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), vars(module))
        wanted += re.findall(r"^print\(.*\)  # (.*)$", block, re.M)
    assert capsys.readouterr().out.splitlines() == wanted and len(wanted) == 3
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
    added = {name: kvsieve.method_info(name) for name in ("vnorm", "smoothed", "ends", "k8v2")}
    assert [info.roles for info in added.values()] == [("evict",), ("evict",), ("read",), ("codec",)]
    assert added["vnorm"].summary == "Largest value norms." and added["vnorm"].parameters["budget"] == "20%"
    # What the page defines is found again in a saved plan.
    for name in added:
        plan = kvsieve.plan(name)
        assert kvsieve.Plan.from_dict(plan.to_dict()) == plan


def test_the_package_to_copy_names_the_method_and_its_module(blocks):
    page = PAGE.read_text(encoding="utf-8")
    package = tomllib.loads(re.search(r"^```toml\n(.*?)^```$", page, re.M | re.S).group(1))
    (name, module), *more = package["project"]["entry-points"]["kvsieve.methods"].items()
    assert not more and f'register_method("{name}"' in blocks[0]
    assert f"`src/{module.replace('.', '/')}.py`" in page
    assert module.partition(".")[0] == package["project"]["name"].replace("-", "_")


def test_nothing_of_hf_is_needed(blocks):
    assert "kvsieve.hf" not in "".join(blocks)
    assert "hf/" not in PAGE.read_text(encoding="utf-8").replace("tests/hf/", "")


def test_the_page_names_the_whole_contract_of_evictors():
    text = PAGE.read_text(encoding="utf-8")
    names = {name for name in vars(Evictor) if not name.startswith("_")} - {"TRAITS"}
    assert {name for name in names | set(Traits.__dataclass_fields__) if f"`{name}`" not in text} == set()
