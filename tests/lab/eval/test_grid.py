"""The grid's order, and what it tells of documents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvsieve.cli import evaluate
from kvsieve.cli.specs import method_specs
from kvsieve.errors import InputError
from kvsieve.lab.eval.cells import settings
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.lab.eval.grid import Grid
from kvsieve.lab.eval.results import load
from kvsieve.lab.eval.runner import run_grid
from kvsieve.lab.eval.store import writing
from kvsieve.lab.tasks import all_tasks
from kvsieve.lab.tasks.public import public_tasks
from kvsieve.lab.tasks.samples import QuestionAnswer, Sample
from tiny_models import build
from toy_words import WORDS, word_tokenizer


@dataclass(frozen=True)
class Asked:
    """Questions about documents of some words, as a public benchmark has them."""

    name: str
    documents: tuple[int, ...]
    new: int = 4
    title: str = "Asked"
    modes: tuple[str, ...] = ("visible", "hidden")

    def __len__(self):
        return len(self.documents)

    def document(self, index):
        return self.documents[index]

    def sample(self, index, length, seed, count):
        words = [WORDS[3 + (7 * i + self.documents[index]) % 110] for i in range(length - 20)]
        score = lambda answer, expected: {"score": 0.0}  # noqa: E731
        return Sample(" ".join(words), (QuestionAnswer(f"w{index}", ("x",), score, self.new),))


def grid(*tasks, samples=9, **given):
    return Grid(tasks, (80,), ("visible", "hidden"), samples, settings([("snapkv", {"window": 4})], ["30%"]), **given)


def test_questions_about_one_document_follow_each_other():
    units = list(grid(Asked("one", (7, 3, 7, 3, 3, 5)), Asked("other", (0, 1)), samples=5).units())
    order = [(unit.task.name, unit.index, unit.question) for unit in units[::2]]
    assert order == [
        *[("one", 0, "visible"), ("one", 2, "visible"), ("other", 0, "visible")],
        *[("one", 1, "visible"), ("one", 3, "visible"), ("one", 4, "visible"), ("other", 1, "visible")],
    ]
    assert all(
        one.key == (*two.key[:2], "visible", two.index) for one, two in zip(units[::2], units[1::2], strict=True)
    )
    assert [str(unit) for unit in units[2:6:2]] == [
        "one, 80 tokens, document 1 of 2, question 2 of 2",
        "other, 80 tokens",
    ]


@pytest.fixture(scope="module")
def evaluator():
    return Evaluator(build("llama", dtype=torch.float32), word_tokenizer())


RUN = {"model": "tiny", "dtype": "float32", "seed": 0, "haystack": "none", "tasks": {"one": "One"}}


class Stop(Exception): ...


def test_going_on_in_the_middle_of_a_document_gives_what_an_undisturbed_run_gives(evaluator, tmp_path):
    chosen, told, rows = grid(Asked("one", (0, 1, 0, 1)), cost_samples=0), [], []

    def progress(done, total, what):
        told.append(what)
        if (done, len(told)) == (3, 4):
            raise Stop

    with writing(tmp_path / "parts", RUN, resume=False) as writer, pytest.raises(Stop):
        run_grid(chosen, evaluator, writer, progress)
    evaluator.documents.forget()
    for folder in ("parts", "whole"):
        with writing(tmp_path / folder, RUN, resume=True) as writer:
            run_grid(chosen, evaluator, writer)
        found = load(tmp_path / folder).samples
        rows.append([{name: value for name, value in row.items() if name not in ("env", "checksum")} for row in found])
    assert rows[0] == rows[1] and len(rows[0]) == 4 * 2 * 2
    assert told[::2] == [f"one, 80 tokens, document 1 of 2, question {number} of 2" for number in (1, 2)]


def test_a_document_without_room_for_its_answer_is_named(evaluator, tmp_path):
    context = evaluator.model.config.max_position_embeddings
    task = Asked("one", (0, 0), new=context - 50)
    wanted = "one, 80 tokens, document 1 of 1, question 1 of 2 needs .* choose a length of at most 50$"
    with writing(tmp_path / "out", RUN, resume=False) as writer, pytest.raises(InputError, match=wanted):
        run_grid(grid(task, cost_samples=0), evaluator, writer)


GRIDS = sorted((Path(__file__).parents[3] / "benchmarks" / "answers" / "grids").glob("*.toml"))


@pytest.mark.parametrize("file", GRIDS, ids=lambda file: file.stem)
def test_committed_grids_name_tasks_and_methods_that_exist(file):
    context = SimpleNamespace()
    evaluate._take_file(context, file)
    given = context.default_map
    assert len(settings(method_specs(given["methods"]), given["budgets"].split(","))) > 1
    known = {*all_tasks(), *(name for name, _ in public_tasks()), "ruler"}
    assert {*given["tasks"].split(",")} <= known and int(given["samples"]) > 0


def test_a_grid_comes_from_a_file_and_the_command_line_goes_before_it(cli, model_dir, tmp_path):
    file, out = tmp_path / "grid.toml", tmp_path / "out"
    file.write_text(
        'tasks = ["needle"]\nlengths = 200\nmethods = ["snapkv:window=4", "knorm"]\nsamples = 7\nbudgets = 20'
    )
    code, _, err = cli("eval", model_dir, "--grid", file, "--samples", 1, "--cost-samples", 0, "--out", out)
    assert code == 0, err
    run = load(out)
    assert {(row["label"], row["budget"]) for row in run.samples} == {
        ("full", None),
        ("snapkv window=4", "20"),
        ("knorm", "20"),
    }
    assert {(row["task"], row["length"], row["sample"]) for row in run.samples} == {("needle", 200, 0)}
    code, _, err = cli("eval", model_dir, "--grid", file, "--server", "http://127.0.0.1:9", "--out", out)
    assert code == 2 and "--budgets, --methods: not with --server" in err


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('method = ["snapkv"]', "sets method; it may set tasks, lengths"),
        ("methods = [", "cannot be read: .*expected TOML such as methods"),
        ('samples = "many"', "--samples"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_a_grid_that_cannot_be_read_is_refused(cli, tmp_path, text, match):
    if text is not None:
        (tmp_path / "grid.toml").write_text(text)
    code, _, err = cli("eval", "--grid", tmp_path / "grid.toml", "--out", tmp_path / "out")
    assert code == 2 and re.search(match, err), err
