"""Differences on the same samples, several directories as one set, the report of them, and its CSV."""

from __future__ import annotations

import csv
import json

import pytest

import fake_results as fake
from kvsieve.errors import InputError
from kvsieve.lab.eval import significance
from kvsieve.lab.eval.aggregate import cells, cost_cells, task_means
from kvsieve.lab.eval.comparison import compared, comparison_tables, verdict_text
from kvsieve.lab.eval.export import COLUMNS, rows_of
from kvsieve.lab.eval.intervals import MeanEstimate
from kvsieve.lab.eval.merge import subjects
from kvsieve.lab.eval.plots_frontier import planned
from kvsieve.lab.eval.results import load
from kvsieve.lab.eval.significance import against, against_full


def row(sample, score, label="snapkv", budget="10%", task="needle", document=None):
    place = {"task": task, "length": 64, "question": "visible", "sample": sample, "label": label, "budget": budget}
    return {**place, "score": score, "meta": {} if document is None else {"document": document}}


def scores(ours, full=1.0, documents=None, **more):
    """Rows of a setting and of full KV, sample by sample."""
    about = documents or [None] * len(ours)
    rows = [row(index, score, document=about[index], **more) for index, score in enumerate(ours)]
    task = more.get("task", "needle")
    return rows + [row(index, full, "full", None, task, about[index]) for index in range(len(ours))]


def one(rows, task="needle", label="snapkv"):
    return against_full(rows)[task, 64, "visible", label, "10%"]


def test_a_difference_has_the_interval_of_its_spread():
    found = one(scores([0.0] * 20 + [1.0] * 30))
    assert (found.mean, found.n, found.clusters, found.different) == (-0.4, 50, 50, 20)
    # A share of 0.4 in 50 has a standard error of 0.069.
    assert found.low == pytest.approx(-0.4 - 1.96 * 0.069, abs=0.02)
    assert found.high == pytest.approx(-0.4 + 1.96 * 0.069, abs=0.02)
    assert found.verdict == "lower" and verdict_text(found) == "lower (p<0.001)"
    assert one(scores([1.0] * 50, full=0.0)).verdict == "higher"
    assert found.p == 2 / 2**20


@pytest.mark.parametrize(
    ("ours", "verdict", "words"),
    [
        ([0.0] * 9, "few", "too few samples"),
        ([0.0] * 10, "lower", "lower (p<0.01)"),
        ([1.0] * 50, "level", "level"),
        ([0.0] * 2 + [1.0] * 48, "level", "level"),
        # Five tosses of a coin that fall alike are no evidence.
        ([0.0] * 5 + [1.0] * 20, "few", "too few differ"),
    ],
)
def test_what_is_claimed(ours, verdict, words):
    found = one(scores(ours))
    assert (found.verdict, verdict_text(found)) == (verdict, words)


def test_samples_about_one_document_count_together():
    ours = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0] * 5
    apart, together = one(scores(ours)), one(scores(ours, documents=[index // 4 for index in range(40)]))
    assert (apart.clusters, together.clusters, together.n, together.mean) == (40, 10, 40, -0.5)
    assert together.high - together.low > 1.6 * (apart.high - apart.low), "four times the questions are not more texts"
    assert one(scores(ours, documents=[index // 8 for index in range(40)])).verdict == "few", "five documents"


def test_tasks_weigh_the_same_and_only_shared_samples_count():
    rows = scores([0.0] * 10) + scores([1.0] * 30, task="kv") + [row(99, 0.0)]
    found = one(rows, task=significance.MEAN)
    assert (found.mean, found.n, found.tasks) == (-0.5, 40, 2)
    assert one(rows).n == 10


def test_a_baseline_is_compared_at_the_same_budget():
    rows = scores([0.0] * 12) + scores([1.0] * 12, label="h2o") + [row(index, 0.0, "h2o", "20%") for index in range(12)]
    found = against(rows, "snapkv")
    assert {(place[0], place[3], place[4]) for place in found} == {("needle", "h2o", "10%"), ("mean", "h2o", "10%")}
    assert found["needle", 64, "visible", "h2o", "10%"].verdict == "higher"


KINDS = ("kept", "memory", "ttft", "tpot")
SMALL = {"tasks": 2, "labels": 3, "budgets": ("10%",), "lengths": (1024,), "samples": 12, "repeats": 1}


def make(folder, run=None, questions=("visible",), **more):
    """A directory of results; run: what its run.json has else."""
    fake.write_results(folder, **{**SMALL, **more}, questions=questions)
    change(folder / "run.json", lambda data: data | (run or {}))
    return folder


def change(file, how):
    lines = file.read_text().splitlines()
    file.write_text("".join(json.dumps(how(json.loads(line))) + "\n" for line in lines))


def test_directories_of_one_model_are_one_subject(tmp_path):
    first, copy = make(tmp_path / "a"), make(tmp_path / "b")
    hidden = make(tmp_path / "c", questions=("hidden",), run={"model": "hub/SmolLM2-135M-Instruct"})
    later = [{"time": "2026-01-01", "processor": "AMD EPYC", "device": "cpu", "python": "3.11.7"}] * 2
    change(hidden / "run.json", lambda data: data | {"environments": later})
    (merged,) = subjects([load(first), load(copy), load(hidden)])
    assert merged.name == "SmolLM2-135M-Instruct" and len(merged.folders) == 3
    samples, costs = merged.results.samples, merged.results.costs
    assert len(samples) == len(load(first).samples) + len(load(hidden).samples)
    # The copy's times are no more measurements; those of the third were measured by another run.
    assert len(merged.results.run["environments"]) == 6 and len(costs) == 2 * len(load(first).costs)
    assert {row["env"] for row in costs} == {0, 4}


def test_models_machines_and_seeds_stay_apart(tmp_path):
    environments = json.loads((make(tmp_path / "a") / "run.json").read_text())["environments"]
    gpu = [{**each, "device": "NVIDIA H100"} for each in environments]
    make(tmp_path / "b", {"environments": gpu})
    make(tmp_path / "c", {"model": "Qwen2.5"})
    make(tmp_path / "d", {"seed": 3})
    found = subjects([load(tmp_path / name) for name in "abcd"])
    assert [each.name for each in found] == [
        "SmolLM2-135M-Instruct, AMD EPYC, seed 0",
        "SmolLM2-135M-Instruct, NVIDIA H100, seed 0",
        "Qwen2.5",
        "SmolLM2-135M-Instruct, AMD EPYC, seed 3",
    ]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda row: row | {"score": 1 - row["score"]}, "sample 0 of needle at 1024 tokens.*another outcome"),
        (lambda row: row | {"expected": [["1"]]}, "sample 0 of needle at 1024 tokens.*another question"),
    ],
)
def test_samples_that_contradict_are_refused(tmp_path, how, words):
    directories = [load(make(tmp_path / "a"))]
    change(make(tmp_path / "b") / "samples.jsonl", how)
    with pytest.raises(InputError, match=f"a' and '.*b' contradict each other: {words}.*give one of them"):
        subjects([*directories, load(tmp_path / "b")])


@pytest.mark.parametrize(
    "run", [{"data": {"needle": "0123456789abcdef"}}, {"haystack": "topics", "environments": [{"python": "3.13.0"}]}]
)
def test_a_task_on_two_texts_is_refused(tmp_path, run):
    first = json.loads((make(tmp_path / "a", questions=("hidden",)) / "run.json").read_text())["environments"][0]
    run = {**run, "environments": [{**first, **each} for each in run.get("environments", [{}])] * 2}
    make(tmp_path / "b", run)
    with pytest.raises(InputError, match="needle is on another text in the second .*evaluate one of them anew"):
        subjects([load(tmp_path / "a"), load(tmp_path / "b")])


def test_a_label_with_other_parameters_is_refused(tmp_path):
    for name, kernel in (("a", 7), ("b", 21)):
        setting = {"label": "snapkv", "budget": "10%", "parameters": {"kernel": kernel, name: 1}}
        make(tmp_path / name, {"settings": [setting]})
    with pytest.raises(InputError, match="'snapkv' at 10% has kernel 7 in the first and 21 in the second"):
        subjects([load(tmp_path / "a"), load(tmp_path / "b")])


def test_a_baseline_is_a_label_or_a_method_with_one(tmp_path):
    found = subjects([load(make(tmp_path / "a"))])
    for name in ("snapkv", "snapkv kernel=21"):
        assert compared(found, name)[0].baseline == "snapkv kernel=21"
    with pytest.raises(InputError, match="--baseline 'h2o' was not evaluated; name one of 'fastkv.*'snapkv kernel=21'"):
        compared(found, "h2o")
    change(tmp_path / "a" / "samples.jsonl", lambda row: row | {"label": row["label"].replace("fastkv", "snapkv")})
    with pytest.raises(InputError, match="stands for several in SmolLM2.*name one of 'snapkv tsp_layer=22"):
        compared(subjects([load(tmp_path / "a")]), "snapkv")


def test_csv_has_every_cell_in_full_precision(tmp_path):
    entries = compared(subjects([load(make(tmp_path / "a"))]), "snapkv")
    rows = rows_of(entries)
    parts = cells(load(tmp_path / "a").samples)
    assert len(rows) == len(parts) + len(task_means(parts)) and all(tuple(row) == COLUMNS for row in rows)
    for row, cell in zip(rows, parts, strict=False):
        assert (row["score"], row["low"], row["kl"], row["n"]) == (cell.score, cell.low, cell.kl, 12)
    fast = next(row for row in rows if row["method"] == "fastkv" and row["task"] == "mean")
    assert fast["machine"] == "AMD EPYC" and fast["less_full_n"] == 24 and 0 < fast["ttft_ratio"] < 0.7
    assert fast["less_baseline_mean"] == pytest.approx(
        fast["score"] - next(row["score"] for row in rows if row["method"] == "snapkv" and row["task"] == "mean")
    )


def test_tables_side_by_side(tmp_path):
    make(tmp_path / "a")
    make(tmp_path / "b", {"model": "Qwen2.5"}, labels=2)
    entries = compared(subjects([load(tmp_path / "a"), load(tmp_path / "b")]), "snapkv")
    (table,) = comparison_tables(entries)
    assert table.headers[:3] == ["model", "method", "budget"] and table.names == 3
    assert [(row[0].text[:4], row[1].text[:6]) for row in table.rows] == [
        ("Smol", "full"), ("Smol", "fastkv"), ("Smol", "snapkv"), ("Qwen", "full"), ("Qwen", "fastkv")
    ]  # fmt: skip
    at = table.headers.index("against full")
    for row in table.rows:
        each = next(each for each in entries if each.subject.name == row[0].text)
        found = each.from_full.get(("mean", 1024, "visible", row[1].text, "10%"))
        assert row[at].text == (verdict_text(found) if found else "–")
        assert (found is None) == (row[1].text == "full")


def test_pictures_show_settings_on_the_same_tasks(tmp_path):
    """A mean over fewer tasks, easy ones say, has no place beside the others."""
    make(tmp_path / "a", tasks=3)
    file = tmp_path / "a" / "samples.jsonl"
    lines = [line for line in file.read_text().splitlines() if '"snapkv' not in line or "ruler_" not in line]
    file.write_text("\n".join(lines) + "\n")
    pictures = {each[0]: each for each in planned(compared(subjects([load(tmp_path / "a")])))}
    kinds = [f"frontier-{measure}-{cost}-visible" for measure in ("score", "kl") for cost in KINDS]
    assert list(pictures) == [*kinds, "groups-visible"]
    (panel,) = pictures["frontier-score-ttft-visible"][4].args[0]
    assert {point.name for point in panel.points} == {"full", "fastkv"}
    costs = {each.label: each for each in cost_cells(load(tmp_path / "a").costs)}
    fast = next(point for point in panel.points if point.name == "fastkv")
    (ratio,) = (each.ratios["ttft_s"] for label, each in costs.items() if label.startswith("fastkv"))
    assert fast.x == ratio and fast.budget == "10%"
    assert next(point.x for point in panel.points if point.name == "full") == 1
    groups = pictures["groups-visible"][4].args[0]
    assert [(each.title.split(":")[0], len(each.points)) for each in groups] == [("needle", 3), ("ruler", 2)]


@pytest.mark.slow
def test_the_command(tmp_path, cli):
    pytest.importorskip("matplotlib")
    make(tmp_path / "a")
    make(tmp_path / "b", {"model": "Qwen2.5"})
    for name in "ab":
        (tmp_path / name / "costs.jsonl").unlink()
    out = tmp_path / "both"
    given = ["report", tmp_path / "a", tmp_path / "b", "--out", out, "--csv", tmp_path / "all.csv", "--formats", "svg"]
    code, text, err = cli(*given, "--baseline", "snapkv")
    assert code == 0 and "Qwen2.5" in text and "against baseline" in text, err
    page = (out / "report.html").read_text()
    assert page.count("<img") == 3 and "https://" not in page and "<script" not in page
    assert "a sign-flip test has p&lt;0.05" in page and "a sign-flip test has p" in (out / "tables.md").read_text()
    names = ["frontier-kl-kept-visible.svg", "frontier-score-kept-visible.svg", "groups-visible.svg"]
    assert sorted(file.name for file in (out / "plots").iterdir()) == names
    with (tmp_path / "all.csv").open(newline="") as file:
        assert {row["model"] for row in csv.DictReader(file)} == {"SmolLM2-135M-Instruct", "Qwen2.5"}
    assert not (tmp_path / "a" / "report.html").exists(), "the directories stay as they are"
    code, _, err = cli("report", tmp_path / "a", "--out", out)
    assert code == 2 and "leave it out" in err


def test_words_for_p():
    chances = [MeanEstimate(-1, -1, -1, p, 50, 50, 50).chance for p in (0.0001, 0.005, 0.04)]
    assert chances == ["p<0.001", "p<0.01", "p<0.05"]
