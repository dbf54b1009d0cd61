"""benchmarks/speed/drafts_of_views.py: counts of views, and their summary."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kvsieve
from benchmarks.speed import drafts_of_views
from tiny import tiny_model, tiny_prompt


def test_a_question_is_answered_with_every_view(tmp_path):
    views = ["kivi", "knorm:budget=30:floor=0"]
    given = {"tokens": 3, "new_tokens": 9, "plan": "full", "views": ";".join(views), "out": tmp_path / "views.json"}
    ids = tiny_prompt(1, 60)
    with kvsieve.attach(tiny_model(dtype=torch.float32), kvsieve.plan("full")) as sieve, torch.no_grad():
        run = drafts_of_views.Run(sieve, "tiny", SimpleNamespace(**given))
        runs = run.question(sieve.begin(ids[:, :40]), ids[0].tolist())
    assert [*runs] == ["none", *views]
    assert all(runs[view]["same"] for view in views)
    # So few tokens are not encoded: the copy drafts the answer itself.
    assert runs["kivi"]["accepted"] == runs["kivi"]["drafted"] > 0
    (row,) = (
        row
        for row in drafts_of_views.summary([{"length": 60, "task": "edit", "runs": runs}])
        if row["view"] == "kivi" and row["task"] == "edit"
    )
    assert row["tokens_per_pass"] == pytest.approx(8 / runs["kivi"]["passes"], abs=0.3)
