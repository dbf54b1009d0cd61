"""The table of models that is shipped says what is found out anew."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

import model_table
from kvsieve.cli import models_table
from tiny_models import FAMILIES


def test_the_table_of_models_is_current(monkeypatch):
    shipped = json.loads(models_table.TABLE.read_text())
    assert [row["family"] for row in shipped["models"]] == [family.name for family in FAMILIES], "run `make docs`"
    for row, family in zip(shipped["models"], FAMILIES, strict=True):
        assert (row.get("since", ""), row.get("broken", "")) == (family.since, family.broken)
    if shipped["transformers"] != metadata.version("transformers"):
        pytest.skip("the table is of another transformers")
    for family, known in zip(FAMILIES, shipped["models"], strict=True):
        if family.name in ("llama", "gemma3n_text", "mamba2"):
            row = model_table.examine(family)
            assert known == json.loads(json.dumps(model_table.shipped(family, row)))

    def fail(name):
        raise ValueError("unrecognized model\nwith a long list")

    monkeypatch.setattr(model_table, "build", fail)
    row = model_table.examine(FAMILIES[0])
    assert (row.status, row.reason) == (models_table.NOT_BUILT, "not in this transformers: unrecognized model")
