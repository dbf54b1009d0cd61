"""The tables that are shipped, so that names are checked and printed without torch: they say what is found out anew."""

from __future__ import annotations

import json
import sys
from importlib import metadata

import pytest

import kvsieve
from kvsieve.cli import known, models_table
from kvsieve.errors import PlanError
from kvsieve.models.families import FAMILIES


@pytest.fixture
def shipped(monkeypatch):
    """Let the shipped table answer, as in a process that has not loaded the registry."""
    monkeypatch.setattr(known, "_suffices", lambda: True)


def test_the_table_of_methods_is_current(usual_floor):
    assert json.loads(known.TABLE.read_text()) == known.made_rows(), "run `make docs`"


def test_a_method_by_the_table(shipped):
    info = known.check_written("snap-kv", {"kernel": 21, "budget": "20%"})
    assert (info.name, info.roles) == ("snapkv", ("evict",)) and "kernel" in info.parameters
    known.check_part("codec", "kivi", {"bits": 4})


@pytest.mark.parametrize(
    ("name", "given", "role"),
    [
        ("snapvk", {}, None),
        ("snapkv", {"kernle": 3}, None),
        ("snapkv", {"compression_ratio": 0.8}, None),
        ("snapkv", {"budget": "ten"}, None),
        ("snapkv", {"budget": "150%"}, None),
        ("snapkv", {}, "codec"),
        ("kivi", {}, "prefill"),
        ("kivy", {}, "codec"),
    ],
)
def test_the_table_refuses_in_the_registrys_words(name, given, role, usual_floor, monkeypatch):
    def message() -> str:
        with pytest.raises(PlanError) as refused:
            known.check_part(role, name, given) if role else known.check_written(name, given)
        return str(refused.value)

    told = message()
    monkeypatch.setattr(known, "_suffices", lambda: True)
    assert message() == told


def test_methods_of_other_packages_are_asked_of_the_registry(monkeypatch):
    monkeypatch.setattr(known, "BUILT_IN", "a.module.that.is.not.loaded")
    monkeypatch.setattr(known, "_brought", lambda: False)
    assert known._suffices()
    monkeypatch.setattr(known, "_brought", lambda: True)
    assert not known._suffices()


def test_the_table_of_models_is_current():
    shipped = json.loads(models_table._TABLE.read_text())
    assert [row["family"] for row in shipped["models"]] == [family.name for family in FAMILIES], "run `make docs`"
    if shipped["transformers"] != metadata.version("transformers"):
        pytest.skip("the table is of another transformers, so it is not used")
    rows = {row["family"]: row for row in shipped["models"]}
    for family in FAMILIES:
        if family.name in ("llama", "gemma3n_text", "mamba2"):
            row = models_table._examine(family)
            assert rows[family.name] == json.loads(json.dumps(vars(row)))


def test_a_process_that_has_loaded_transformers_examines_it(monkeypatch):
    version = json.loads(models_table._TABLE.read_text())["transformers"]
    assert models_table.shipped_rows(version) is None
    monkeypatch.delitem(sys.modules, "transformers")
    assert [row.family for row in models_table.shipped_rows(version)] == [family.name for family in FAMILIES]
    assert models_table.shipped_rows("0.1") is None


def test_methods_printed_from_the_table_are_the_registrys(shipped, usual_floor, cli, monkeypatch):
    quick = cli("methods")[1], cli("methods", "--json")[1]
    monkeypatch.setattr(known, "_suffices", lambda: False)
    assert quick == (cli("methods")[1], cli("methods", "--json")[1])
    assert json.loads(quick[1])[0]["name"] == kvsieve.list_methods()[0] == "full"
