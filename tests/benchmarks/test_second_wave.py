"""The run of many methods in padded batches: it answers as `kvsieve eval` does, continues, and stops in time."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import glance
from benchmarks.answers import second_wave
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.eval.results import load

GRID = """
tasks = ["needle", "toolcalls"]
lengths = 180
methods = ["snapkv:window=4", "nothing_of_this_name", "h2o", "quest:page=8"]
budgets = ["25%"]
samples = 3
question = "both"
"""


@pytest.fixture
def given(model_dir, tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(GRID)
    return second_wave.Given(str(model_dir), (str(file),), None, "cpu", "eager", "float32")


@pytest.fixture
def worker(given):
    return second_wave.Worker(given)


def test_cells_take_every_setting_of_a_task_before_the_next(given):
    grids = second_wave.listed_grids(given)
    cells = list(second_wave.cells_of(grids, 2))
    assert [setting.label for setting in grids[0].settings] == ["full", "snapkv window=4", "h2o", "quest page=8"]
    assert len(cells) == 2 * 2 * 2 * 4 and len(set(cells)) == len(cells)
    assert [cell.task for cell in cells] == (["needle"] * 8 + ["toolcalls"] * 8) * 2
    assert [cell.samples for cell in cells] == [(0, 1)] * 16 + [(2,)] * 16
    assert {cell.question for cell in cells[:4]} == {"visible"} and {cell.setting for cell in cells[:4]} == {0, 1, 2, 3}


@pytest.mark.parametrize("question", ["visible", "hidden"])
def test_a_batch_answers_as_eval_does(worker, question):
    (grid,) = worker.grids
    evaluator = Evaluator(worker.model, worker.tokenizer)
    settings = [worker.setting(0, at) for at in range(4)]
    found = {}
    for index in range(3):
        sample, _ = worker.sample(0, "needle", 180, index)
        for setting, outcome in zip(
            settings, evaluator.run(sample, [each.plan for each in settings], question), strict=True
        ):
            found[setting.label, index] = outcome
    with torch.no_grad():
        for at, setting in enumerate(settings):
            rows = worker.run(second_wave.Cell(0, "needle", 180, question, (0, 1, 2), at))
            assert [row["sample"] for row in rows] == [0, 1, 2] and all(row["batch"] == 3 for row in rows)
            for row in rows:
                outcome = found[setting.label, row["sample"]]
                # The share that H2O keeps while decoding is of the context there, of the whole prompt here.
                words = 20 if (setting.method, question) == ("h2o", "hidden") else None
                assert row["answers"][0].split()[:words] == outcome.answers[0].split()[:words]
                assert "kl" not in row and row["applied"] == outcome.applied
                assert row["kv_share"] == pytest.approx(
                    sum(outcome.record.kept.values()) / len(outcome.record.kept) / outcome.record.prompt_tokens,
                    abs=0.02,
                )


def test_a_batch_that_fails_is_run_one_by_one(worker, monkeypatch):
    calls = []
    real = worker._run

    def run(cell, indices):
        calls.append(tuple(indices))
        if len(indices) > 1:
            raise RuntimeError("too large")
        return real(cell, indices)

    monkeypatch.setattr(worker, "_run", run)
    with torch.no_grad():
        rows = worker.run(second_wave.Cell(0, "needle", 180, "visible", (0, 1), 0))
    assert calls == [(0, 1), (0,), (1,)] and len(rows) == 2


@pytest.mark.slow
def test_a_run_continues_and_is_a_directory_of_results(given, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    command = ["second_wave", given.model, "--grids", *given.grids, "--workers", "1", "--rows", "2", "--device", "cpu"]
    command += ["--dtype", "float32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, "--minutes", "0"])
    second_wave.main()
    assert "0 cells run, 0 done before, 0 failures" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", command)
    second_wave.main()
    results = load(out)
    assert len(results.samples) == 2 * 2 * 3 * 4 and results.labels[0] == "full"
    assert "32 cells run, 0 done before, 0 failures" in capsys.readouterr().out
    second_wave.main()
    assert "0 cells run, 32 done before" in capsys.readouterr().out
    assert json.loads((out / "run.json").read_text())["settings"]


# At a glance


def rows_of(scores, question="visible", length=4096, read=None):
    """Rows of one task by method and budget: scores of each sample."""
    return [
        {
            "task": f"t{at % 2}",
            "sample": at,
            "length": length,
            "question": question,
            "method": method,
            "label": f"{method} window=4",
            "budget": budget,
            "score": score,
            "kv_share": 1.0 if read else {None: 1.0, "10%": 0.1, "25%": 0.25}.get(budget, 0.3),
            "kv_read_share": read,
        }
        for (method, budget), mine in scores.items()
        for at, score in enumerate(mine)
    ]


def test_the_glance_compares_on_samples_that_all_have():
    full = [1.0] * 12
    scores = {
        ("full", None): full,
        ("snapkv", "25%"): [1.0] * 9 + [0.0] * 3,
        ("random", "25%"): [0.0] * 12,
        ("good", "25%"): [1.0] * 12,
        ("bad", "25%"): [0.0] * 11 + [1.0],
        ("rare", "25%"): [1.0] * 3,
        ("threshold", None): [0.5] * 12,
    }
    one = glance.glance(rows_of(scores), "visible", True)
    assert one.prompts == 12 and one.left_out == ("rare at 25%",) and one.full == 100
    assert one.points["snapkv", "25%"].share == 75 and one.points["snapkv", "25%"].stored == pytest.approx(25)
    assert one.points["threshold", "own"].share == 50
    assert one.points["good", "25%"].against["random"][1] > 0
    said = "\n".join(glance.verdicts(one))
    assert "Above `random` beyond chance: at 25% `good`, `snapkv`." in said
    assert "No better than a random choice at 25%, beyond chance: `bad`." in said
    assert "Without enough prompts: rare at 25%." in said
    table = glance.table(one)
    assert "|method|25%|own|stored at 25%|stored at own|" in table
    assert table.index("`good`") < table.index("`snapkv`") < table.index("`random`")
    assert glance.glance(rows_of(scores), "hidden", True) is None
    assert glance.glance(rows_of(scores), "visible", False) is None


def test_pictures_of_the_glance_are_drawn(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import pages

    scores = {("full", None): [1.0] * 10}
    scores |= {(f"method{at}", budget): [at / 30] * 10 for at in range(30) for budget in ("10%", "25%")}
    one = glance.glance(rows_of(scores), "visible", True)
    monkeypatch.setattr(pages, "glances", lambda: [one])
    panels = list(pages._glance())
    assert len(panels) == 1 and len(panels[0].series) == 30
    pages.draw(panels, tmp_path / "glance.png")
    assert 10_000 < (tmp_path / "glance.png").stat().st_size < 150_000
