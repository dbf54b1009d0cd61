"""Reading results directories and bringing samples down to cells."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest

import fake_results as fake
from kvsieve.errors import InputError
from kvsieve.lab.eval.aggregate import budgets_of, cells, cost_cells, score_interval, task_means
from kvsieve.lab.eval.results import load
from kvsieve.lab.eval.store import writing


@pytest.fixture
def folder(tmp_path):
    return fake.write_results(tmp_path, tasks=2, labels=3, budgets=("10%",), lengths=(2048,), samples=2, repeats=2)


def sample(score, index=0, **changes):
    row = {"task": "needle", "length": 1024, "question": "visible", "sample": index, "label": "snapkv", "budget": "10%"}
    return {**row, "score": score, **changes}


def cost(label, repeat, ttft, tokens, **changes):
    row = {"length": 1024, "label": label, "budget": None if label == "full" else "10%", "repeat": repeat, "env": 0}
    return {**row, "new_tokens": len(tokens) + 1, "ttft_s": ttft, "token_s": tokens, "kv_bytes": 100, **changes}


@pytest.mark.parametrize(
    ("scores", "low", "high"),
    # The first two are in every table of Clopper and Pearson's intervals.
    [([1, 0] * 5, 0.1871, 0.8129), ([0] * 10, 0, 0.3085), ([0.5, 1, 0.5, 0.5], 0.1228, 0.9715)],
)
def test_a_score_has_an_interval(scores, low, high):
    assert score_interval(scores, range(len(scores))) == pytest.approx((low, high), abs=5e-5)


def test_questions_about_one_document_narrow_no_score():
    apart = score_interval([1.0, 0.0] * 20, range(40))
    together = score_interval([1.0] * 4 + [0.0] * 4 + [1.0, 0.0] * 16, [index // 4 for index in range(40)])
    alike = score_interval(([1.0] * 4 + [0.0] * 4) * 5, [index // 4 for index in range(40)])
    assert alike[1] - alike[0] > 1.9 * (apart[1] - apart[0]) and together[1] - together[0] < alike[1] - alike[0]


def test_cells_take_means_of_what_is_there():
    rows = [
        sample(1.0, 0, metrics={"score": 1.0, "exact": 1.0}, kl=0.2, top1=1.0, kv_share=0.1),
        sample(0.5, 1, metrics={"score": 0.5, "exact": 0.0, "partial": 0.5}, kl=None, top1=0.5, applied=False),
        sample(0.0, 0, task="other"),
    ]
    first, second = cells(rows)
    assert (first.task, first.n, first.score, first.not_applied) == ("needle", 2, 0.75, 1)
    assert first.metrics == {"exact": 0.5, "partial": 0.5}
    assert (first.kl, first.top1, first.kv_share, first.kl_last) == (0.2, 0.75, 0.1, None)
    assert (first.low, first.high) == score_interval([1.0, 0.5], range(2))
    assert second.n == 1


def test_tasks_weigh_the_same_in_their_mean():
    rows = [sample(1.0, index) for index in range(9)] + [sample(0.0, 0, task="other")]
    (mean,) = task_means(cells(rows))
    assert (mean.score, mean.n, mean.tasks) == (0.5, 10, 2)
    # Of a mean of two each, half of both widths together: 1 - 0.025 ** (1 / 9), and 0.975.
    assert (mean.low, mean.high) == pytest.approx((0.5 - 0.3363 / 2, 0.5 + 0.975 / 2), abs=5e-5)


def test_costs_are_medians_and_ratios_are_taken_within_a_repeat():
    rows = [
        cost("full", 0, 1.0, [0.1, 0.1]),
        cost("full", 1, 10.0, [0.1, 0.1]),
        cost("full", 2, 4.0, [0.1, 0.1]),
        cost("snapkv", 0, 0.5, [0.1, 0.2], kv_bytes=25),
        cost("snapkv", 1, 2.0, [0.1, 0.3], kv_bytes=25),
        cost("snapkv", 2, 3.0, [0.1, 0.4], kv_bytes=25),
        cost("snapkv", 3, 9.0, [0.1, 0.5], kv_bytes=25),
    ]
    full, ours = cost_cells(rows)
    assert full.ratios["ttft_s"] == 1.0
    assert ours.ratios["ttft_s"] == 0.5  # of 0.5, 0.2 and 0.75; the fourth repeat has no partner
    assert ours.ratios["kv_bytes"] == 0.25
    assert ours.repeats == 4
    assert ours.median("ttft_s") == 2.5
    assert ours.spreads["tpot_s"].median == pytest.approx(0.15)  # over all single tokens
    assert ours.spreads["tpot_s"].p99 == pytest.approx(0.493)
    assert ours.spreads["ttft_s"].p95 == pytest.approx(8.1)
    speeds = sorted(3 / (ttft + sum(tokens)) for ttft, tokens in ((0.5, [0.3]), (2, [0.4]), (3, [0.5]), (9, [0.6])))
    assert ours.median("tokens_per_s") == pytest.approx((speeds[1] + speeds[2]) / 2)
    assert ours.median("peak_bytes") is None and "peak_bytes" not in ours.ratios


def test_load_orders_labels_and_tasks(folder):
    results = load(folder)
    assert results.labels[0] == "full" and len(results.labels) == 3
    assert list(results.tasks) == ["needle", "ruler_niah_single_1"]
    assert len(cells(results.samples)) == 2 * 2 * 3
    assert len(cost_cells(results.costs)) == 3
    assert all(math.isfinite(cell.kl) for cell in cells(results.samples))


def test_budgets_are_sorted_by_their_size():
    parts = cells(sample(1.0, budget=budget) for budget in ("64", "20%", "5%", None, "1024"))
    assert budgets_of(parts) == [None, "5%", "20%", "64", "1024"]


def test_a_half_written_last_line_is_ignored(folder):
    before = load(folder)
    for name in ("samples.jsonl", "costs.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"task": "needle", "len')
    after = load(folder)
    assert (after.samples, after.costs) == (before.samples, before.costs)


def test_duplicates_keep_the_first(folder):
    before = load(folder).samples
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({**before[0], "score": 0.123}) + "\n")
    assert load(folder).samples == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{half", "not JSON"),
        ("[1]", "expected an object, got list"),
        ("{}", "'task' is missing"),
        (json.dumps(sample("good")), "'score' is 'good', expected a number"),
        (json.dumps(sample(7)), "'score' is 7, expected 0 to 1"),
    ],
)
def test_a_broken_line_is_named(folder, line, message):
    file = folder / "samples.jsonl"
    lines = file.read_text().splitlines()
    lines[2] = line
    file.write_text("\n".join(lines))
    with pytest.raises(InputError, match="line 3") as error:
        load(folder)
    assert message in str(error.value) and "samples.jsonl" in str(error.value)


def test_what_is_missing_is_said(folder, tmp_path):
    with pytest.raises(InputError, match="not a directory.*kvsieve eval --out"):
        load(tmp_path / "nothing")
    (folder / "samples.jsonl").write_text("")
    (folder / "costs.jsonl").unlink()
    with pytest.raises(InputError, match="no finished sample"):
        load(folder)
    (folder / "run.json").write_text('{"format": 2}')
    with pytest.raises(InputError, match="expected format 1, got 2"):
        load(folder)
    (folder / "run.json").unlink()
    with pytest.raises(InputError, match="no run.json.*kvsieve eval --out"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", "0", "'seed' is '0', expected an integer"),
        ("seed", True, "'seed' is True, expected an integer"),
        ("model", None, "'model' is None, expected text"),
        ("dtype", ["x"] * 99, "'dtype' is \\['x', .*…, expected text"),
        ("haystack", ..., "'haystack' is missing"),
        ("tasks", [], "'tasks' is \\[\\], expected an object"),
        ("tasks", {"needle": 1}, "the task 'needle' has the title 1, expected text"),
        ("environments", {}, "'environments' is {}, expected a list"),
        ("environments", [{}, 3], "environment 1 is 3, expected an object"),
        ("seconds", "long", "'seconds' is 'long', expected a number"),
        ("seconds", float("nan"), "'seconds' is nan, expected wall time"),
        pytest.param("seconds", 10**400, "'seconds' is 1000.*, expected wall time", id="seconds-huge"),
        ("settings", 1, "'settings' is 1, expected a list"),
        ("settings", [{"label": "full"}], "setting 0: 'budget' is missing"),
        ("settings", ["full"], "setting 0: expected an object, got str"),
    ],
)
def test_a_spoiled_field_of_a_run_is_named(folder, name, value, message):
    file = folder / "run.json"
    run = json.loads(file.read_text())
    run[name] = value
    if value is ...:
        del run[name]
    file.write_text(json.dumps(run))
    with pytest.raises(InputError, match=f"run.json: {message}") as error:
        load(folder)
    assert len(str(error.value)) < 300 + len(str(folder))
    with pytest.raises(InputError, match=message), writing(folder, run, resume=True):
        pass


@pytest.mark.parametrize("data", [b"", b"[1]", b"\xff\xfe{", b"[" * 100_000, b'{"format": 1}', b"{" + b'"a":' * 9])
def test_a_spoiled_run_is_refused(folder, data):
    (folder / "run.json").write_bytes(data)
    with pytest.raises(InputError, match="run.json"):
        load(folder)


@pytest.mark.parametrize("name", ["run.json", "samples.jsonl"])
def test_a_file_that_may_not_be_read_is_not_missing(folder, name, monkeypatch):
    read = Path.read_bytes

    def refuse(file):
        if file.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InputError, match=f"{name} cannot be read: Permission denied"):
        load(folder)


def test_ratios_are_taken_within_one_invocation():
    rows = [cost("full", 0, 2.0, [0.2]), cost("knorm", 0, 1.0, [0.1])]
    rows += [cost("full", 0, 8.0, [0.8], env=1), cost("snapkv", 0, 2.0, [0.4], env=1)]
    found = {cell.label: cell for cell in cost_cells(rows)}
    assert found["knorm"].ratios["ttft_s"] == 0.5 and found["snapkv"].ratios["ttft_s"] == 0.25
    assert found["full"].repeats == 2 and found["full"].median("ttft_s") == 5.0
