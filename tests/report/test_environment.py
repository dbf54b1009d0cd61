"""The stamp of numbers names the commit that was measured."""

from __future__ import annotations

import hashlib
import json
import subprocess

import pytest

from kvsieve.report import environment as stamps
from tiny_models import build


def test_the_commit_is_that_of_the_whole_package(monkeypatch):
    asked, told = [], [""]

    def run(command, **options):
        asked.append(command[3:])
        return subprocess.CompletedProcess(command, 0, "abc\n" if "rev-parse" in command else told[0])

    monkeypatch.delenv("KVSIEVE_COMMIT", raising=False)
    monkeypatch.setattr(stamps.subprocess, "run", run)
    for status, commit in (("", "abc"), (" M core/pages.py\n", "abc+")):
        told[0] = status
        assert stamps.environment()["commit"] == commit
    monkeypatch.setenv("KVSIEVE_COMMIT", "def")
    assert stamps.environment()["commit"] == "def"


def test_changes_anywhere_in_the_package_count(monkeypatch):
    roots = []
    monkeypatch.delenv("KVSIEVE_COMMIT", raising=False)
    monkeypatch.setattr(
        stamps.subprocess, "run", lambda command, **_: roots.append(command[2]) or subprocess.CompletedProcess(0, 0, "")
    )
    stamps.environment()
    assert {root.rsplit("/", 1)[-1] for root in roots} == {"kvsieve"}


def test_the_stamp_names_the_kind_of_processor(monkeypatch):
    monkeypatch.setattr(stamps, "cpu_kind", lambda: "of a kind")
    assert stamps.environment()["processor"].endswith(", of a kind")


def test_the_stamp_names_the_weights(tmp_path):
    model = build("llama")
    assert stamps.environment()["weights"] is None
    assert stamps.environment(model)["weights"] == "random"
    model.save_pretrained(tmp_path)
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert stamps.weights_digest(tmp_path) == f"model.safetensors sha256:{digest}"
    loaded = type(model).from_pretrained(tmp_path)
    assert stamps.environment(loaded)["weights"] == f"model.safetensors sha256:{digest}"
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert stamps.weights_digest(loaded) == f"model.safetensors sha256:{hashlib.sha256(b'others').hexdigest()}"


def test_of_a_hub_model_the_revision_is_named():
    model = build("llama")
    model.config._name_or_path, model.config._commit_hash = "owner/name", "abc123"
    assert stamps.weights_digest(model) == "owner/name revision:abc123"
    model.config._commit_hash = None
    assert stamps.weights_digest(model) == stamps.UNRECORDED


def test_results_without_a_stamp_are_not_written(tmp_path):
    file = tmp_path / "deep" / "result.json"
    with pytest.raises(ValueError, match=r"result\.json without environment"):
        stamps.write_result(file, {"rows": [1]})
    result = {"parts": [{"environment": stamps.environment(), "rows": [1]}]}
    stamps.write_result(file, result)
    assert json.loads(file.read_text()) == result
    assert list(stamps.stamps(result)) == [result["parts"][0]["environment"]]
    assert [each.name for each in file.parent.iterdir()] == [file.name]
