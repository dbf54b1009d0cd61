"""What describes the repository agrees with it: the version, hooks, templates, the guide for contributors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import kvsieve
from source_tree import needs_results

ROOT = Path(__file__).parent.parent


def test_the_version_stands_in_one_file_and_others_agree():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version", "readme"]' in project
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


@needs_results
def test_results_kept_in_git_stay_small():
    """All that benchmarks/results adds to a clone; what is not tracked does not count."""
    folder = ROOT / "benchmarks" / "results"
    files = [file for file in folder.rglob("*") if file.is_file()]
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        files = [folder / name for name in listed.split("\0") if name and (folder / name).exists()]
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    assert len(sizes) > 40
    assert sum(sizes.values()) <= 6_000_000, sorted(sizes.items(), key=lambda each: -each[1])[:10]
