"""A results directory: what continues it, what is refused, and what a kill leaves."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from kvsieve.errors import InputError, PlanError
from kvsieve.eval.cells import settings
from kvsieve.eval.store import ResultsWriter, writing

RUN = {"model": "toy", "dtype": "float32", "seed": 0, "haystack": "noise", "tasks": {"needle": "Needle"}}
RUN["settings"] = [{"label": "full", "budget": None, "method": "full", "parameters": {}}]


def row(task="needle", sample=0, label="full", budget=None, **more):
    key = {"task": task, "length": 64, "question": "visible", "sample": sample, "label": label, "budget": budget}
    return {**key, "score": 1.0, "env": 0, **more}


def rows_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_rows_and_run_are_written_and_found_again(tmp_path):
    with writing(tmp_path / "out", RUN, resume=False) as writer:
        writer.samples.add([row(), row(label="knorm", budget="10%")])
        writer.save(2.0)
    with writing(tmp_path / "out", {**RUN, "tasks": {"kv": "KV"}}, resume=True) as writer:
        assert writer.samples.done == {
            ("needle", 64, "visible", 0, "full", None),
            ("needle", 64, "visible", 0, "knorm", "10%"),
        }
        assert writer.env == 1
        writer.save(3.0)
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["seconds"] == 5.0 and run["tasks"] == {"needle": "Needle", "kv": "KV"}
    assert not (tmp_path / "out" / ".lock").exists()
    assert len(run["environments"]) == 2 and run["environments"][0]["torch"]


def test_results_are_continued_only_when_asked(tmp_path):
    with writing(tmp_path, RUN, resume=True):
        pass
    with pytest.raises(InputError, match="add --resume"), writing(tmp_path, RUN, resume=False):
        pass


@pytest.mark.parametrize(
    "changed", [{"model": "other"}, {"seed": 1}, {"dtype": "bfloat16"}, {"haystack": "topics"}], ids=str
)
def test_another_run_does_not_continue_these(tmp_path, changed):
    with writing(tmp_path, RUN, resume=False):
        pass
    ((name, value),) = changed.items()
    with pytest.raises(InputError) as refused, writing(tmp_path, {**RUN, **changed}, resume=True):
        pass
    assert repr(RUN[name]) in str(refused.value) and repr(value) in str(refused.value)


def test_parameters_that_changed_do_not_continue_the_old_ones(tmp_path):
    def run(kernel, **more):
        given = {"label": "snapkv", "budget": "10%", "method": "snapkv", "parameters": {"kernel": kernel, **more}}
        return {**RUN, "settings": [given]}

    with writing(tmp_path, RUN, resume=False):
        pass
    for gained in ({}, {"every": None}):
        with writing(tmp_path, run(7, **gained), resume=True):
            pass
    assert [each["label"] for each in json.loads((tmp_path / "run.json").read_text())["settings"]] == ["full", "snapkv"]
    with pytest.raises(InputError, match="'kernel': 7.*'kernel': 21"), writing(tmp_path, run(21), resume=True):
        pass


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not empty"), writing(tmp_path, RUN, resume=False):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_torn_line_takes_its_unit_with_it(tmp_path):
    with writing(tmp_path, RUN, resume=False) as writer:
        writer.samples.add([row(sample=0), row(sample=0, label="knorm", budget="10%")])
        writer.samples.add([row(sample=1), row(sample=1, label="knorm", budget="10%")])
    file = tmp_path / "samples.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    with writing(tmp_path, RUN, resume=True) as writer:
        assert {key[3] for key in writer.samples.done} == {0}
        writer.samples.add([row(sample=1)])
    assert [(each["sample"], each["label"]) for each in rows_of(tmp_path)] == [(0, "full"), (0, "knorm"), (1, "full")]


def test_a_line_broken_in_the_middle_is_named(tmp_path):
    with writing(tmp_path, RUN, resume=False) as writer:
        writer.samples.add([row()])
    file = tmp_path / "samples.jsonl"
    file.write_text("oops\n" + file.read_text())
    with pytest.raises(InputError, match="line 1: not JSON"), writing(tmp_path, RUN, resume=True):
        pass


def _try_to_write(folder, answers):
    try:
        ResultsWriter(folder, RUN, resume=True)
        answers.put("wrote")
    except InputError as error:
        answers.put(str(error))


def test_two_processes_do_not_write_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    with writing(tmp_path, RUN, resume=False):
        answers = context.Queue()
        other = context.Process(target=_try_to_write, args=(tmp_path, answers))
        other.start()
        assert "another process is writing" in answers.get(timeout=300)
        other.join()


def test_settings_cross_methods_with_budgets():
    methods = [("full", {}), ("snapkv", {"kernel": 21}), ("knorm", {"budget": "30%"}), ("streamingllm", {})]
    made = settings(methods, ["10%", "64"])
    assert [(each.label, each.budget) for each in made] == [
        ("full", None),
        ("snapkv kernel=21", "10%"),
        ("knorm", "30%"),
        ("streamingllm", "10%"),
        ("snapkv kernel=21", "64"),
        ("streamingllm", "64"),
    ]
    assert made[1].plan.evict.kernel == 21 and str(made[1].plan.evict.budget) == "10%"
    assert made[1].parameters["window"] == 32 and json.dumps(made[1].parameters)


def test_full_always_runs_and_budgets_have_a_default():
    assert [(each.label, each.budget) for each in settings([("snapkv", {})], [])] == [("full", None), ("snapkv", "20%")]


@pytest.mark.parametrize("budgets", [["10%", "0.1"], ["64", "64"]], ids=str)
def test_naming_a_setting_twice_is_refused(budgets):
    with pytest.raises(PlanError, match="named twice"):
        settings([("snapkv", {})], budgets)
