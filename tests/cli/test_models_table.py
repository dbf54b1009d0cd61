"""The table of models that is shipped, so that it is printed without transformers: it says what is found out anew."""

from __future__ import annotations

import json
import sys
from importlib import metadata

import pytest

from kvsieve.cli import models_table
from kvsieve.models.families import FAMILIES


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
