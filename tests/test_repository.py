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


def test_the_version_stands_in_one_file():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version", "readme"]' in project
    source = re.search(r'^path = "(src/kvsieve/\w+\.py)"$', project, re.M).group(1)
    assert f'__version__ = "{kvsieve.__version__}"' in (ROOT / source).read_text()
    for name, pattern in {"README.md": r"[Vv]ersion \d+\.\d+\.\d+", "CITATION.cff": r"^version:"}.items():
        assert re.search(pattern, (ROOT / name).read_text(), re.M) is None, f"{name} states a version of its own"


def sections() -> list[tuple[tuple[int, ...], str, str]]:
    """The changelog's: version, what its heading has in parentheses, text; the newest first."""
    _, *parts = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    headings = [re.fullmatch(r"(\d+\.\d+\.\d+) \((.+)\)", part.partition("\n")[0]) for part in parts]
    assert all(headings), "## X.Y.Z (YYYY-MM-DD), or (unreleased)"
    return [
        (numbers(found.group(1)), found.group(2), part.partition("\n")[2])
        for found, part in zip(headings, parts, strict=True)
    ]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def agrees(version: str, dated: list[tuple[int, ...]]) -> bool:
    """Tell whether a version agrees with the changelog's dated sections: a release is the newest, .devN follows it."""
    release, dev = re.fullmatch(r"(\d+\.\d+\.\d+)(\.dev\d+)?", version).groups()
    return dated[0] < numbers(release) if dev else dated[0] == numbers(release)


def test_the_changelog_has_a_dated_section_of_each_release():
    found = sections()
    versions = [version for version, *_ in found]
    assert versions == sorted(versions, reverse=True)
    dates = {version: date for version, date, _ in found}
    assert all(re.match(r"\d{4}-\d\d-\d\d", date) or date == "unreleased" for date in dates.values())
    dated = [version for version in versions if dates[version] != "unreleased"]
    assert dated == versions[-len(dated) :] and len(versions) - len(dated) <= 1
    assert agrees(kvsieve.__version__, dated), f"{kvsieve.__version__} and CHANGELOG.md's dates do not agree"


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("0.3.0", True), ("0.4.0.dev0", True), ("0.2.0", False), ("0.4.0", False), ("0.3.0.dev0", False)],
)
def test_versions_that_agree_with_a_dated_section_of_0_3_0(version, wanted):
    assert agrees(version, [(0, 3, 0), (0, 2, 0)]) == wanted


def test_lines_of_the_changelog_are_short_and_in_order():
    for version, _, text in sections():
        kinds = re.findall(r"^### (.+)$", text, re.M)
        assert kinds == [each for each in ("Upgrading", "Added", "Changed", "Fixed") if each in kinds], version
        for line in re.findall(r"^- .*(?:\n  .*)*", text, re.M):
            assert len(line.split()) <= 31, line


def test_the_hooks_before_a_commit_run_what_make_runs():
    text, makefile = (ROOT / ".pre-commit-config.yaml").read_text(), (ROOT / "Makefile").read_text()
    hooks = re.findall(r"entry: \.venv/bin/(\w+(?: \w+)?)", text)
    assert hooks == ["ruff check", "ruff format", "mypy"]
    assert all(f"$(BIN)/{hook}" in makefile for hook in hooks)


@pytest.mark.parametrize(
    "name", [".pre-commit-config.yaml", "CITATION.cff", ".github/ISSUE_TEMPLATE", ".github/workflows"]
)
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
