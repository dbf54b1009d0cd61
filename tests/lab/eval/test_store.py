"""A results directory: what continues it, what is refused, and what a kill leaves."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import multiprocessing
import os

import pytest

from kvsieve import folders
from kvsieve.errors import InputError, KvsieveError, PlanError
from kvsieve.lab.eval import store
from kvsieve.lab.eval.cells import settings
from kvsieve.lab.eval.results import load
from kvsieve.lab.eval.rows import contents, packed_name
from kvsieve.lab.eval.store import ResultsWriter, writing
from kvsieve.lab.tasks.haystack import load_haystack, text_digest
from tiny_models import build

RUN = {"model": "toy", "dtype": "float32", "seed": 0, "haystack": "noise", "tasks": {"needle": "Needle"}}
RUN["settings"] = [{"label": "full", "budget": None, "method": "full", "parameters": {}}]


def row(task="needle", sample=0, label="full", budget=None, **more):
    key = {"task": task, "length": 64, "question": "visible", "sample": sample, "label": label, "budget": budget}
    return {**key, "score": 1.0, "env": 0, **more}


def rows_of(folder):
    """Packed rows and those behind them."""
    return [json.loads(line) for _, data in contents(folder / "samples.jsonl") for line in data.splitlines()]


def unpack(folder):
    """The plain file of a run that did not come to its end."""
    file = folder / "samples.jsonl"
    file.write_bytes(gzip.decompress(packed_name(file).read_bytes()))
    packed_name(file).unlink()
    return file


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
    assert len(run["environments"]) == 2 and run["environments"][0]["torch"]


def test_results_are_continued_only_when_asked(tmp_path):
    with writing(tmp_path, RUN, resume=True):
        pass
    with pytest.raises(InputError, match="add --resume"), writing(tmp_path, RUN, resume=False):
        pass


@pytest.mark.parametrize(
    "changed",
    [{"model": "other"}, {"seed": 1}, {"dtype": "bfloat16"}, {"haystack": "topics"}, {"draft": "lookup"}],
    ids=str,
)
def test_another_run_does_not_continue_these(tmp_path, changed):
    with writing(tmp_path, RUN, resume=False):
        pass
    ((name, value),) = changed.items()
    with pytest.raises(InputError) as refused, writing(tmp_path, {**RUN, **changed}, resume=True):
        pass
    assert repr(RUN.get(name)) in str(refused.value) and repr(value) in str(refused.value)


TOPICS, NOISE = "d9dc35bce5ab1a24", text_digest(load_haystack("noise"))


@pytest.mark.parametrize(
    ("haystack", "python", "same"),
    [
        ("noise", "3.13.0", NOISE),
        ("topics", "3.11.7", TOPICS),
        ("topics", "3.13.0", None),
        ("topics", None, None),
        ("/some/folder", "3.11.7", None),
    ],
)
def test_results_without_digests_are_continued_on_a_text_that_is_known(tmp_path, haystack, python, same):
    old = {"format": 1, **RUN, "haystack": haystack, "environments": [{"python": python}], "seconds": 1.0}
    (tmp_path / "run.json").write_text(json.dumps(old))
    if same is None:
        for digest in (TOPICS, NOISE):
            with pytest.raises(InputError, match=f"results of needle on another text .* than --haystack has .{digest}"):
                ResultsWriter(tmp_path, {**RUN, "haystack": haystack, "data": {"needle": digest}}, resume=True)
        return
    with writing(tmp_path, {**RUN, "haystack": haystack, "data": {"needle": same}}, resume=True) as writer:
        assert writer.run["data"] == {"needle": same}


def test_digests_are_by_task(tmp_path):
    """Tasks on files know nothing of the haystack; a task on another text is refused beside them."""
    with writing(tmp_path, {**RUN, "data": {"needle": "a", "leval_quality": "b"}}, resume=False):
        pass
    with writing(tmp_path, {**RUN, "tasks": {"kv": "KV"}, "data": {"kv": "c"}}, resume=True) as writer:
        assert writer.run["data"] == {"needle": "a", "leval_quality": "b", "kv": "c"}
    for task, option in (("kv", "--haystack"), ("leval_quality", "--data")):
        with pytest.raises(InputError, match=f"results of {task} .* than {option} has .x.; give the same text"):
            ResultsWriter(tmp_path, {**RUN, "data": {task: "x"}}, resume=True)


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
    file = unpack(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    with writing(tmp_path, RUN, resume=True) as writer:
        assert {key[3] for key in writer.samples.done} == {0}
        writer.samples.add([row(sample=1)])
    assert [(each["sample"], each["label"]) for each in rows_of(tmp_path)] == [(0, "full"), (0, "knorm"), (1, "full")]


def test_a_line_broken_in_the_middle_is_named(tmp_path):
    with writing(tmp_path, RUN, resume=False) as writer:
        writer.samples.add([row()])
    file = unpack(tmp_path)
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


def test_the_lock_stays_one_file(tmp_path):
    """Were it deleted, who had opened it before and who comes after could both hold the directory."""
    with writing(tmp_path, RUN, resume=False):
        first = (tmp_path / ".lock").stat().st_ino
        with pytest.raises(InputError, match="another process"), writing(tmp_path, RUN, resume=True):
            pass
    assert (tmp_path / ".lock").stat().st_ino == first
    with pytest.raises(InputError, match="seed"), writing(tmp_path, {**RUN, "seed": 1}, resume=True):
        pass
    with writing(tmp_path, RUN, resume=True):
        assert (tmp_path / ".lock").stat().st_ino == first


# Kills, full disks, damage


class Killed(BaseException):
    pass


class System:
    """os, of which one call is the last: what it writes arrives in part. most: bytes a write takes at once."""

    def __init__(self, last=None, most=None, error=None):
        self.left, self.most, self.error, self.steps = last, most, error, 0

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "replace", "ftruncate", "close", "unlink"):
            return real

        def call(*given):
            self.steps += 1
            if self.steps == self.left:
                if name == "write":
                    os.write(given[0], given[1][: len(given[1]) // 2])
                raise self.error or Killed
            if name == "fsync":
                return None  # nobody cuts the power here
            if name == "write" and self.most:
                given = given[0], given[1][: self.most]
            return real(*given)

        return call


@pytest.fixture
def system(monkeypatch):
    monkeypatch.setattr(store, "environment", lambda: {"torch": "1"})

    def use(**how):
        made = System(**how)
        for module in (store, folders):
            monkeypatch.setattr(module, "os", made)
        return made

    return use


def evaluate(folder, told=None):
    """Three units of two rows each; told: what was done, as it is done."""
    with writing(folder, RUN, resume=True) as writer:
        for index in range(3):
            rows = [row(sample=index, env=writer.env), row(sample=index, env=writer.env, label="knorm", budget="10%")]
            done = [tuple(each[name] for name in store.SAMPLE_KEY) in writer.samples.done for each in rows]
            assert done[0] == done[1], "half a unit"
            if not done[0]:
                writer.samples.add(rows)
                told = [] if told is None else told
                told.append(index)
            writer.save(1.0)


def keys(folder):
    return [(each["sample"], each["label"]) for each in rows_of(folder)]


def loaded(folder):
    """What a report would read."""
    try:
        return [(each["sample"], each["label"]) for each in load(folder).samples]
    except InputError:
        return []


def test_a_kill_at_any_step_loses_the_unit_in_progress_at_most(tmp_path, system):
    steps = system()
    evaluate(tmp_path / "whole")
    whole = keys(tmp_path / "whole")
    assert len(whole) == 6 and steps.steps > 40 and sorted(file.name for file in (tmp_path / "whole").iterdir()) == [
        ".lock", "run.json", "samples.jsonl.gz"]  # fmt: skip
    for first in range(1, steps.steps + 1):
        for second in (1, 5, 8, 11, 14):
            folder, told = tmp_path / f"{first} {second}", []
            for last in (first, second):
                system(last=last)
                with pytest.raises(Killed):
                    evaluate(folder, told)
                assert set(itertools.product(told, ("full", "knorm"))) <= set(loaded(folder)), (first, second)
            system()
            evaluate(folder, told)
            # What was said to be done is not done again.
            assert len(told) == len(set(told)) and keys(folder) == whole, (first, second)
            assert load(folder).run["environments"][-1] == {"torch": "1"}


@pytest.mark.parametrize("lines", range(5))
def test_a_unit_is_found_whole_or_not_at_all(tmp_path, system, lines):
    """Killed between two rows that were to be written in one go, with no torn line to tell."""
    system()
    evaluate(tmp_path)
    file = unpack(tmp_path)
    file.write_bytes(b"".join(file.read_bytes().splitlines(True)[:lines]))
    evaluate(tmp_path, told := [])
    assert told == list(range(lines // 2, 3)) and len(keys(tmp_path)) == 6


def test_a_finished_run_is_packed_and_goes_on(tmp_path):
    with writing(tmp_path / "a", RUN, resume=False) as writer:
        writer.samples.add([row(sample=0)])
        writer.samples.add([row(sample=1)])
        plain = (tmp_path / "a" / "samples.jsonl").read_bytes()
    packed = (tmp_path / "a" / "samples.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == plain and not (tmp_path / "a" / "samples.jsonl").exists()
    with writing(tmp_path / "a", RUN, resume=True):
        pass
    assert (tmp_path / "a" / "samples.jsonl.gz").read_bytes() == packed, "nothing was added"
    with writing(tmp_path / "a", RUN, resume=True) as writer:
        assert {key[3] for key in writer.samples.done} == {0, 1}
        writer.samples.add([row(sample=2)])
        assert keys(tmp_path / "a") == [(each, "full") for each in range(3)]
    assert keys(tmp_path / "a") == [(each, "full") for each in range(3)]
    # The same rows give the same bytes, in however many runs they came.
    with writing(tmp_path / "b", RUN, resume=False) as writer:
        for index in range(3):
            writer.samples.add([row(sample=index)])
    assert (tmp_path / "a" / "samples.jsonl.gz").read_bytes() == (tmp_path / "b" / "samples.jsonl.gz").read_bytes()


def test_a_run_that_failed_is_not_packed(tmp_path):
    with pytest.raises(Killed), writing(tmp_path, RUN, resume=False) as writer:
        writer.samples.add([row(sample=0)])
        raise Killed
    assert (tmp_path / "samples.jsonl").exists() and not packed_name(tmp_path / "samples.jsonl").exists()


@pytest.mark.parametrize("read", ["resume", "load"])
@pytest.mark.parametrize("damage", ["cut", "changed", "another", "line"])
def test_a_packed_file_that_is_damaged_is_named(tmp_path, read, damage):
    with writing(tmp_path, RUN, resume=False) as writer:
        writer.samples.add([row(sample=index) for index in range(3)])
    file = tmp_path / "samples.jsonl.gz"
    data, words = file.read_bytes(), "samples.jsonl.gz is damaged.*run its samples again"
    if damage == "cut":
        data = data[:-12]
    elif damage == "changed":
        data = data[:60] + bytes([data[60] ^ 255]) + data[61:]
    elif damage == "another":
        data = b'{"task": "needle"}'
    else:
        data = gzip.compress(gzip.decompress(data).replace(b'"score": 1.0', b'"score": 0.0', 1))
        words = "samples.jsonl.gz, line 1: it does not match its checksum.*unpack it with gunzip, delete the line"
    file.write_bytes(data)
    with pytest.raises(InputError, match=words):
        if read == "load":
            load(tmp_path)
        else:
            with writing(tmp_path, RUN, resume=True):
                pass


def test_what_a_write_leaves_is_written_too(tmp_path, system):
    system(most=7)
    evaluate(tmp_path)
    assert len(keys(tmp_path)) == 6


@pytest.mark.parametrize("step", range(1, 50))
def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path, system, step):
    system(last=step, error=OSError(errno.ENOSPC, "No space left on device"))
    told = []
    try:
        evaluate(tmp_path, told)
    except KvsieveError as error:
        assert "No space left on device; what was finished before is kept" in str(error)
    # A disk that is full only for a while leaves no half rows behind.
    assert len(loaded(tmp_path)) == 2 * len(told)
    system()
    evaluate(tmp_path, told)
    assert told == [0, 1, 2] and len(keys(tmp_path)) == 6


def test_a_folder_left_before_there_was_a_run_is_begun_anew(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".run.json.0123456789ab.kvsieve-tmp").write_text('{"format"')
    with writing(tmp_path, RUN, resume=False) as writer:
        writer.samples.add([row()])
    assert keys(tmp_path) == [(0, "full")] and not (tmp_path / ".run.json.0123456789ab.kvsieve-tmp").exists()


def test_a_torn_line_leaves_what_came_before_in_its_place(tmp_path):
    """The file is cut, not written anew: nothing that was on the disk is ever on its way."""
    with writing(tmp_path, RUN, resume=False) as writer:
        writer.samples.add([row(sample=0)])
        writer.samples.add([row(sample=1)])
    file = unpack(tmp_path)
    before, number = file.read_bytes(), file.stat().st_ino
    file.write_bytes(before[:-20])
    with writing(tmp_path, RUN, resume=True):
        assert file.stat().st_ino == number and before.startswith(file.read_bytes())
    assert keys(tmp_path) == [(0, "full")]


@pytest.mark.parametrize("read", ["resume", "load"])
def test_a_row_that_was_changed_is_named(tmp_path, read):
    with writing(tmp_path, RUN, resume=False) as writer:
        writer.samples.add([row(sample=0, answers=["é \ud83d"]), row(sample=1)])
    assert load(tmp_path).samples[0] == row(sample=0, answers=["é \ud83d"])
    file = unpack(tmp_path)
    before = file.read_bytes()
    file.write_bytes(before.replace(b'"score": 1.0', b'"score": 0.0', 1))

    def again():
        if read == "load":
            load(tmp_path)
        else:
            with writing(tmp_path, RUN, resume=True):
                pass

    with pytest.raises(InputError, match="samples.jsonl, line 1: it does not match its checksum.*delete the line"):
        again()
    # Rows as versions without checksums wrote them.
    file.write_text("".join(json.dumps(row(sample=index)) + "\n" for index in range(2)))
    again()
    assert len(load(tmp_path).samples) == 2


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


def test_rows_of_other_weights_are_refused(tmp_path):
    model = build("llama")
    with writing(tmp_path, RUN, resume=False) as writer:
        writer.settle([], model)
        writer.save(0.0)
    assert json.loads((tmp_path / "run.json").read_text())["environments"][0]["weights"] == "random"
    model.config._name_or_path, model.config._commit_hash = "owner/name", "abc123"
    with (
        writing(tmp_path, RUN, resume=True) as writer,
        pytest.raises(InputError, match="results of the weights random, this model has owner/name revision:abc123"),
    ):
        writer.settle([], model)
