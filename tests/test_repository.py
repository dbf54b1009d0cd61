"""What describes the repository agrees with it: the version, hooks, templates, the guide for contributors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import kvsieve

ROOT = Path(__file__).parent.parent


def test_the_version_stands_in_one_file_and_others_agree():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    source = re.search(r'^path = "(src/kvsieve/\w+\.py)"$', project, re.M).group(1)
    assert f'__version__ = "{kvsieve.__version__}"' in (ROOT / source).read_text()
    stated = {
        "CHANGELOG.md": r"^## (\d+\.\d+\.\d+)",  # the newest comes first
        "README.md": r"^\*\*Status\.\*\* Version (\d+\.\d+\.\d+)",
        "CITATION.cff": r"^version: \"?(\d+\.\d+\.\d+)",
    }
    for name, pattern in stated.items():
        found = re.search(pattern, (ROOT / name).read_text(), re.M)
        assert found is None or found.group(1) == kvsieve.__version__, name


def test_the_hooks_before_a_commit_run_what_make_runs():
    text, makefile = (ROOT / ".pre-commit-config.yaml").read_text(), (ROOT / "Makefile").read_text()
    hooks = re.findall(r"entry: \.venv/bin/(\w+(?: \w+)?)", text)
    assert hooks == ["ruff check", "ruff format", "mypy"]
    assert all(f"$(BIN)/{hook}" in makefile for hook in hooks)


@pytest.mark.parametrize("name", [".pre-commit-config.yaml", "CITATION.cff", ".github/ISSUE_TEMPLATE"])
def test_files_for_other_tools_can_be_read(name):
    yaml = pytest.importorskip("yaml")
    path = ROOT / name
    for file in sorted(path.glob("*.yml")) if path.is_dir() else [path]:
        read = yaml.safe_load(file.read_text())
        assert isinstance(read, dict) and json.dumps(read), file.name


def test_the_guide_names_files_and_folders_that_exist():
    text = (ROOT / "AGENTS.md").read_text()
    for name in re.findall(r"`((?:src|tests|docs|examples)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
    for package in re.findall(r"src/kvsieve/(\w+)/", text):
        assert (ROOT / "src" / "kvsieve" / package).is_dir(), package
