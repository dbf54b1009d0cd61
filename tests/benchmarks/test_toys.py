"""benchmarks/toys: the task, a few steps of training for each geometry, and the measurement of an untrained toy."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.toys import geometries, measure, tables, task, train, where

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 brought the optimiser")

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}

STAGES = (task.Task(length=32, records=3, questions=2, symbols=16), task.Task(length=48, records=4, questions=2))


def drawn(shape: task.Task, rows: int = 5) -> torch.Tensor:
    return shape.sample(rows, torch.Generator().manual_seed(0))


def tiny(geometry: str):
    return geometries.build(geometry, 0, **SMALL)


def test_each_answer_follows_its_key_in_the_context_and_no_symbol_stands_twice_there():
    shape = task.Task(length=96, records=7, questions=4, value=3, symbols=40)
    for row in drawn(shape).tolist():
        context, questions = row[: shape.context], row[shape.context :]
        symbols = [token for token in context if token >= task.FIRST_SYMBOL]
        assert len(row) == 96 and row[0] == task.BOS and len(symbols) == len(set(symbols)) == 28
        assert all(token in task.FILLER or token in symbols for token in context[1:])
        keys = questions[1::5]
        assert questions[::5] == [task.QUESTION] * 4 and len(set(keys)) == 4
        for number, key in enumerate(keys):
            answer = [row[place] for place in shape.answers[number]]
            assert answer == context[context.index(key) + 1 :][:3] == questions[5 * number + 2 :][:3]


def test_the_records_move_and_batches_differ():
    shape = task.Task(length=64, records=4, questions=1)
    generator = torch.Generator().manual_seed(0)
    first, second = shape.sample(50, generator), shape.sample(50, generator)
    assert not torch.equal(first, second)
    starts = (first[:, : shape.context] >= task.FIRST_SYMBOL).int().argmax(1)
    assert len(starts.unique()) > 5


def test_a_task_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit: -"):
        task.Task(length=32, records=8, questions=2)
    with pytest.raises(ValueError, match="no symbol stands twice"):
        task.Task(length=256, records=8, questions=2, symbols=16)


@pytest.mark.parametrize("geometry", geometries.GEOMETRIES)
def test_training_repeats_itself_and_moves_every_weight(geometry):
    def run(seed: int):
        model = tiny(geometry)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        done = train.train(model, train.Recipe(stages=STAGES, tokens=96, most_steps=4), seed)
        return before, model.state_dict(), done

    before, weights, done = run(1)
    _, again, _ = run(1)
    assert done.steps == 4 and not done.learned
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not [name for name, weight in before.items() if torch.equal(weight, weights[name])]
    _, other, _ = run(2)
    assert not torch.equal(weights["lm_head.weight"], other["lm_head.weight"])


def test_stages_follow_each_other_and_the_last_settles():
    """With marks that anything passes, each stage takes one step and the run ends `settle` steps after the last."""
    recipe = train.Recipe(stages=STAGES, tokens=96, settle=20, pass_mark=0.0, final_mark=0.0)
    model = tiny("dense")
    done = train.train(model, recipe, 0)
    assert done.learned and done.steps == 2 + 20 and not model.training
    assert [(row["step"], row["stage"]) for row in done.curve] == [(20, 1)]


def test_a_run_out_of_time_says_that_nothing_was_learned():
    done = train.train(tiny("dense"), train.Recipe(stages=STAGES, tokens=96, limit_s=0.0), 0)
    assert (done.learned, done.steps, done.curve) == (False, 0, [])


def test_the_command_leaves_a_checkpoint_and_its_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "build", lambda geometry, seed: tiny(geometry))
    monkeypatch.setattr(train, "Recipe", partial(train.Recipe, stages=STAGES, tokens=96))
    train.main(["latent", "--out", str(tmp_path), "--minutes", "0.001", "--results", str(tmp_path)])
    assert "latent: NOT learned in " in capsys.readouterr().out
    saved = json.loads((tmp_path / "toys_latent.json").read_text())
    assert saved == json.loads((tmp_path / "latent" / "curve.json").read_text())
    assert saved["model_type"] == "deepseek_v3" and "torch" in saved["environment"] and saved["learned"] is False
    assert 0 <= saved["held_out"]["answers"] <= saved["held_out"]["tokens"] <= 1


def test_an_untrained_toy_is_measured_under_every_plan(monkeypatch):
    """Every method and propagator acts; a plan's numbers are those of its budget."""
    monkeypatch.setattr(measure, "SHARES", (0.5,))
    model = geometries.build("dense", 0, **SMALL, num_hidden_layers=3).eval()
    found = measure.table(model, task.Task(length=64, records=6, questions=1), 2, 0)
    assert found["transformers"] == found["rows"][0]["answers"]
    assert not [row for row in found["rows"] if "refused" in row]
    acted = [row for row in found["rows"] if row["applied"]]
    assert {row["method"] for row in acted} >= {*measure.EVICTORS, *measure.READERS, "tsp", "fastkv", "gemfilter"}
    half = next(row for row in found["rows"] if row["method"] == "snapkv")
    assert half["kv_entries"] == [30, 30, 30] and half["kv_bytes"] < found["rows"][0]["kv_bytes"]


def test_a_refusal_is_recorded_in_its_own_words():
    model = tiny("dense").eval()
    shape = task.Task(length=64, records=6, questions=1)
    row = measure.measure(model, measure.Cell("propagate", "tsp", 0.5, layer=9), drawn(shape, 2), shape)
    assert row["refused"].startswith("PlanError: TSP layer 9 is outside the model")
    assert "TSP layer 9 is outside" in measure.line(row)


def test_the_summary_has_a_row_for_each_method_and_layer_at_one_share(tmp_path):
    def row(role, method, share, answers, layer=None, **others):
        shown = {"role": role, "method": method, "share": share, "layer": layer, "hidden": False, "applied": True}
        return {**shown, "answers": answers, **others}

    rows = {
        "sinks": [
            row("full", "full", None, 1.0),
            row("evict", "snapkv", 0.1, 0.5),
            row("evict", "snapkv", 0.25, 0.75),
            row("evict", "snapkv", 0.25, 0.125, hidden=True),
            row("propagate", "tsp", 0.25, 0.2, layer=3),
        ],
        "latent": [
            row("full", "full", None, 0.98),
            row("evict", "snapkv", 0.25, 0.0, refused="PlanError"),
            row("propagate", "tsp", 0.25, 1.0, layer=1, applied=False),
        ],
    }
    for name, each in rows.items():
        (tmp_path / f"toys_{name}_methods.json").write_text(json.dumps({"rows": each}))
    assert tables.summary(tmp_path).splitlines() == [
        "|method|sinks|latent|",
        "|---|---|---|",
        "|`full`|100|98|",
        "|`snapkv`|75|refused|",
        "|`tsp`, layer 1||100\\*|",
        "|`tsp`, layer 3|20||",
    ]


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="no place for the table 'states'"):
        tables.filled("# page\n", {"states": "| a |"})


def test_the_weight_on_the_answer_is_that_of_its_first_token():
    model, prompts = tiny("hybrid").eval(), drawn(task.Task(length=64, records=6, questions=1), 3)[:, :-4]
    mass = where.answer_mass(model, prompts)
    assert mass.keys() == {"1", "3", "5"} and model.config._attn_implementation == "sdpa"
    # Untrained, every entry weighs about the same.
    assert all(0.5 / 60 < each < 2 / 60 for each in mass.values())


def test_an_early_exit_is_trained_beside_the_last():
    shape, model = STAGES[1], tiny("hybrid")
    ids = drawn(shape, 2)
    last, early = train.answer_logits(model, ids, shape, early=2)
    assert torch.equal(last, train.answer_logits(model, ids, shape)[0]) and not torch.equal(last, early)
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    assert torch.equal(train.answer_logits(model, ids, shape)[0], early)
    done = train.train(tiny("hybrid"), train.Recipe(stages=STAGES, tokens=96, most_steps=2, early=1), 0)
    assert done.steps == 2
