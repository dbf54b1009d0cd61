"""`kvsieve eval`, killed at random points and resumed, gives what an undisturbed run gives; and what it refuses."""

from __future__ import annotations

import json
import random
import time

import pytest

from forked import forked
from kvsieve.cli.main import run_cli
from kvsieve.lab.eval.rows import contents

pytestmark = pytest.mark.slow

GRID = [
    "--tasks",
    "needle,multiturn,shared",
    "--lengths",
    "150",
    "--methods",
    "snapkv:window=4,fastkv:tsp_layer=0",
]
GRID += ["--budgets", "20%", "--samples", "2", "--question", "both", "--cost-samples", "1", "--dtype", "float32"]


def lines(folder, name="samples.jsonl"):
    """Packed ones and those behind them."""
    return [line for _, data in contents(folder / name) for line in data.splitlines()]


def rows(folder, name="samples.jsonl"):
    """Without what tells one invocation from another."""
    read = [json.loads(line) for line in lines(folder, name)]
    found = {}
    for row in read:
        assert row.pop("env") >= 0 and len(row.pop("checksum")) == 16 and row.pop("more") < 5
        key = row["task"], row["length"], row["question"], row["sample"], row["label"], row["budget"]
        assert key not in found, f"{key} was computed twice"
        found[key] = row
    return found


def test_killed_twice_and_resumed_gives_the_same_table(model_dir, tmp_path, cli):
    code, out, err = cli("eval", model_dir, *GRID, "--out", tmp_path / "whole", "--json")
    assert code == 0, err
    whole, table = rows(tmp_path / "whole"), json.loads(out)
    assert len(whole) == 2 * (2 + 2 + 1) * 3
    command = ["eval", model_dir, *GRID, "--resume", "--out", str(tmp_path / "killed"), "--json"]
    file, chance, kills = tmp_path / "killed" / "samples.jsonl", random.Random(3), 0
    for _ in range(2):
        had = file.stat().st_size if file.exists() else 0
        with forked(lambda tell: run_cli(command)) as (child, _):
            while child.is_alive() and (not file.exists() or file.stat().st_size == had):
                time.sleep(0.005)
            time.sleep(chance.random() * 0.3)
            kills += child.is_alive()
    assert kills == 2, "the run ended before it could be killed twice"
    assert 0 < len(rows_or_torn(file)) < len(whole)
    # What a kill in the middle of a write would leave.
    file.write_bytes(file.read_bytes()[:-20])
    code, out, err = cli("eval", model_dir, *GRID, "--resume", "--out", tmp_path / "killed", "--json")
    assert code == 0, err
    assert rows(tmp_path / "killed") == whole
    resumed = json.loads(out)
    assert resumed["cells"] == table["cells"] and resumed["means"] == table["means"]
    assert len(resumed["run"]["environments"]) == 3
    # Nothing remains to be done, so nothing is.
    before = lines(tmp_path / "killed")
    assert cli("eval", model_dir, *GRID, "--resume", "--out", tmp_path / "killed")[0] == 0
    assert lines(tmp_path / "killed") == before and not file.exists()


def rows_or_torn(file):
    return file.read_bytes().split(b"\n")[:-1]


def test_a_method_is_added_without_running_the_rest_again(model_dir, tmp_path, cli):
    grid = [
        "--tasks",
        "needle",
        "--lengths",
        "150",
        "--samples",
        "2",
        "--dtype",
        "float32",
        "--draft",
        "lookup:ngram=1",
        "--out",
        str(tmp_path / "out"),
    ]
    assert cli("eval", model_dir, *grid, "--methods", "knorm", "--cost-samples", "2")[0] == 0
    first = lines(tmp_path / "out")
    assert all("passes" in json.loads(line)["drafts"] for line in first)
    code, _, err = cli("eval", model_dir, *grid, "--draft", "none", "--resume")
    assert code == 2 and "holds results with draft 'lookup:ngram=1', this run has None" in err
    code, _, err = cli("eval", model_dir, *grid, "--weights", "int8", "--resume")
    assert code == 2 and "holds results with weights None, this run has 'int8'" in err
    code, out, err = cli(
        "eval", model_dir, *grid, "--methods", "knorm,streamingllm", "--cost-samples", "2", "--resume", "--json"
    )
    assert code == 0, err
    after = lines(tmp_path / "out")
    added = [json.loads(line) for line in after[len(first) :]]
    assert after[: len(first)] == first and {row["label"] for row in added} == {"streamingllm"} and len(added) == 4
    costs = [json.loads(line) for line in lines(tmp_path / "out", "costs.jsonl")]
    again = [(row["label"], row["repeat"]) for row in costs if row["env"] == 1]
    assert {label for label, _ in again} == {"full", "streamingllm"}, "full KV is timed again beside what is new"
    table = json.loads(out)
    new = next(each for each in table["costs"] if each["label"] == "streamingllm")
    assert new["repeats"] == 2 and new["ratios"]["kv_bytes"] < 1
    assert cli("report", tmp_path / "out")[0] == 0


def test_full_kv_runs_alone(model_dir, tmp_path, cli):
    grid = [
        "--tasks",
        "needle",
        "--lengths",
        "150",
        "--samples",
        "2",
        "--dtype",
        "float32",
        "--out",
        str(tmp_path / "out"),
    ]
    code, _, err = cli("eval", model_dir, *grid, "--methods", "full", "--cost-samples", "0")
    assert code == 0, err
    assert [row["label"] for row in rows(tmp_path / "out").values()] == ["full", "full"]


def test_rows_carry_what_happened(model_dir, tmp_path, cli):
    grid = [
        "--tasks",
        "needle",
        "--lengths",
        "150",
        "--samples",
        "1",
        "--dtype",
        "float32",
        "--out",
        str(tmp_path / "out"),
    ]
    methods = "fastkv:tsp_layer=0;tsp_rate=0.5"
    assert cli("eval", model_dir, *grid, "--methods", methods, "--budgets", "20%", "--seed", "5")[0] == 0
    full, fast = map(json.loads, lines(tmp_path / "out"))
    tokens = full["prompt_tokens"]
    assert 147 <= tokens <= 150 and full["kv_entries"] == tokens and full["kl"] == 0 and full["budget"] is None
    assert fast["kv_entries"] == int(0.2 * tokens) and fast["deep_tokens"] == tokens // 2 and fast["applied"]
    assert fast["seed"] == 5 and fast["meta"] == {"depth": 0.0} and fast["kl"] > 0 and len(fast["answers"]) == 1
    costs = [json.loads(line) for line in lines(tmp_path / "out", "costs.jsonl")]
    assert len(costs) == 6 and all(len(row["token_s"]) == 31 for row in costs)
    kept = next(row for row in costs if row["label"] != "full")["kept"]
    whole = next(row for row in costs if row["label"] == "full")["kept"]
    assert all(share == 1 for layer in whole for share in layer)
    assert all(sum(layer) / len(layer) == pytest.approx(0.2, abs=0.05) for layer in kept)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--tasks", "neddle"], "did you mean 'needle'"),
        (["--lengths", "two"], "--lengths takes tokens such as"),
        (["--lengths", "100k"], "a length of 102400 tokens"),
        (["--lengths", "100000"], "context"),
        (["--lengths", "20"], "at least"),
        (["--methods", "snapvk"], "did you mean 'snapkv'"),
        (["--budgets", "0"], "at least 1"),
        (["--budgets", "ten"], "neither a share"),
        (["--question", "maybe"], "visible, hidden or both"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--haystack", "no/such/folder"], "no/such/folder"),
        (["--tasks", "shared", "--question", "visible"], "--question"),
        (["--tasks", "scbench_kv", "--data", "no/such"], "no/such"),
        (["--data", "x"], "leval_quality"),
        (["--dtype", "int3"], "--dtype"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_refused_in_one_line(model_dir, tmp_path, cli, wrong, words):
    good = {
        "--tasks": "needle",
        "--lengths": "150",
        "--samples": "1",
        "--out": str(tmp_path / "out"),
        "--dtype": "float32",
    }
    given = {**good, **dict(zip(wrong[::2], wrong[1::2], strict=True))}
    code, out, err = cli("eval", model_dir, *[part for pair in given.items() for part in pair])
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 2 and len(errors) == 1 and words in errors[0] and out == ""


def test_tasks_are_listed(cli):
    code, out, _ = cli("tasks", "--json")
    names = [each["name"] for each in json.loads(out)]
    assert code == 0 and {"needle", "passkey64", "kv", "multiturn", "scbench_kv"} <= set(names)
    assert len([name for name in names if name.startswith("ruler_")]) == 13
