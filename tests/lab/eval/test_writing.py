"""A results directory after a run that was refused before its first row."""

from __future__ import annotations

import json

import pytest

REFUSED = {
    "a length beyond the context": ["--lengths", "4096"],
    "a method that needs a profile": ["--methods", "duoattention"],
    "a layer outside the model": ["--methods", "fastkv:tsp_layer=99"],
}
GIVEN = ["--tasks", "needle", "--samples", "1", "--cost-samples", "0", "--budgets", "20%", "--dtype", "float32"]


@pytest.mark.parametrize("refused", REFUSED)
def test_a_corrected_run_takes_the_directory_of_a_refused_one(refused, cli, model_dir, tmp_path):
    out = tmp_path / "out"
    code, _, err = cli("eval", model_dir, *GIVEN, "--lengths", "150", *REFUSED[refused], "--out", out)
    assert code == 2 and "holds results" not in err
    assert not (out / "run.json").exists()
    code, printed, err = cli(
        "eval", model_dir, *GIVEN, "--lengths", "150", "--methods", "knorm", "--out", out, "--json"
    )
    assert code == 0, err
    assert [one["label"] for one in json.loads(printed)["run"]["settings"]] == ["full", "knorm"]
    code, _, err = cli("eval", model_dir, *GIVEN, "--lengths", "4096", "--out", out, "--resume")
    assert code == 2 and (out / "run.json").exists(), "results that were there stay"
