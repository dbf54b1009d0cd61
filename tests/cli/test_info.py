"""What the command line says of this machine: extras, kernels, and files that cannot be read."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from kvsieve.cli import info
from kvsieve.kernels.cpu import build as kernels
from kvsieve.kernels.cpu import mass, prompt
from unreadable import forbid


def lines(text: str, kind: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{kind}:")]


@pytest.mark.parametrize("name", ["model.safetensors", "weights.gguf"])
def test_weights_that_may_not_be_read_are_not_missing(cli, model_dir, tmp_path, monkeypatch, name):
    shutil.copytree(model_dir, tmp_path / "model")
    file = tmp_path / "model" / name
    file.touch()
    forbid(monkeypatch, file)
    for command in (("run", "--prompt", "w1 w2"), ("doctor",)):
        _, _, err = cli(command[0], file if name.endswith("gguf") else file.parent, *command[1:])
        error = lines(err, "error")[-1]
        assert name in error and "cannot be read" in error and "Permission denied" in error


def test_doctor_lists_every_extra(cli, monkeypatch):
    monkeypatch.setattr(info, "_installed", lambda package: None)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    out = cli("doctor")[1]
    for extra, needed in project["optional-dependencies"].items():
        assert f"pip install 'kvsieve[{extra}]'" in out
        # Those that work on kvsieve itself read the file.
        if extra not in ("docs", "dev"):
            packages = {re.split(r"[\[>=]", each)[0].replace("-", "_") for each in needed} - {"kvsieve"}
            listed = {package.replace("-", "_") for package, extras in info._EXTRAS.items() if extra in extras}
            assert listed == packages


def test_a_machine_without_kernels_is_told_once(cli, model_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "false")
    monkeypatch.delenv("KVSIEVE_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_reasons", [])
    caches = (kernels.library, mass.reason, prompt.reason)
    for each in caches:
        each.cache_clear()
    try:
        code, _, err = cli(
            *("run", model_dir, "--prompt", "w1 w2 w3", "--method", "full", "--max-new-tokens", "2"),
            *("--codec", "kivi:bits=4", "--device", "cpu", "--dtype", "float32"),
        )
    finally:
        for each in caches:
            each.cache_clear()
    told = "warning: no compiled kernels, so plain torch computes more slowly (`kvsieve doctor`): false made no kernels"
    assert code == 0 and len(lines(err, "warning")) == 1 and lines(err, "warning")[0].startswith(told)
