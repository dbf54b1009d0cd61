"""The distributions: metadata, README on the package index, files of the wheel and of the source archive."""

from __future__ import annotations

import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvsieve

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "kvsieve"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RAW = "https://raw.githubusercontent.com/kvsieve/kvsieve/main/"
BLOB = "https://github.com/kvsieve/kvsieve/blob/main/"
builds = pytest.mark.skipif(
    not all(importlib.util.find_spec(each) for each in ("hatchling", "hatch_fancy_pypi_readme")),
    reason="the build backend is not installed",
)


def shown_readme() -> str:
    """README as the package index shows it: pyproject's substitutions, which `re.sub` makes."""
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    (fragment,) = hook["fragments"]
    text = (ROOT / fragment["path"]).read_text()
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def build(kind: str, folder: Path) -> Path:
    """Build a wheel or an sdist of the tree with the installed backend."""
    code = f"import sys, hatchling.build as b; print(b.build_{kind}(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return folder / made.stdout.split()[-1]


def test_links_of_the_readme_on_the_index_are_absolute():
    targets = re.findall(r"\]\(([^)]+)\)", shown_readme())
    assert len(targets) > 20
    for target in targets:
        assert target.startswith(("https://", "#")), target
        for base in (RAW, BLOB):
            if target.startswith(base):
                path = target.removeprefix(base).partition("#")[0]
                assert (ROOT / path).exists() or path.endswith(".png"), target
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", shown_readme())
    assert pictures and all(each.startswith(RAW) for each in pictures)


def test_the_metadata_says_who_what_and_where():
    project = PROJECT["project"]
    classifiers = project["classifiers"]
    assert [each for each in classifiers if each.startswith("Operating System")] == [
        "Operating System :: POSIX :: Linux"
    ]
    pythons = [each.rpartition(" ")[2] for each in classifiers if re.search(r"Python :: 3\.\d", each)]
    assert pythons == ["3.11", "3.12", "3.13", "3.14"] and project["requires-python"] == f">={pythons[0]}"
    assert "Typing :: Typed" in classifiers and project["authors"] and len(project["keywords"]) >= 5
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= project["urls"].keys()
    for name in project["license-files"]:
        assert (ROOT / name).is_file(), name


def test_hosted_tests_run_on_declared_pythons():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    declared = " ".join(PROJECT["project"]["classifiers"])
    assert len(pythons) == 3 and all(f"Python :: {each}" in declared for each in pythons)
    assert jobs["publish"]["needs"] == [name for name in jobs if name != "publish"], "an upload waits for every job"
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"


@builds
def test_the_wheel_has_the_package_and_nothing_else(tmp_path):
    with zipfile.ZipFile(build("wheel", tmp_path)) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about, text = email.message_from_bytes(wheel.read(metadata)), wheel.read(metadata).decode()
    files = {file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    wanted = {f"kvsieve/{file.relative_to(PACKAGE)}" for file in files}
    info = metadata.partition("/")[0]
    assert wanted == {name for name in names if not name.startswith(f"{info}/")}
    assert {"kvsieve/py.typed", "kvsieve/__init__.pyi"} <= wanted
    assert {Path(name).suffix for name in wanted} <= set(".py .pyi .typed .c .h .json .js .css .html .txt .gz".split())
    # 90 files of C and web page would be missed, and data of tests would show, by the size alone.
    assert (tmp_path / f"kvsieve-{kvsieve.__version__}-py3-none-any.whl").stat().st_size < 1_800_000
    licences = {name.removeprefix(f"{info}/licenses/") for name in names if "/licenses/" in name}
    assert licences == set(PROJECT["project"]["license-files"])
    assert about["Name"] == "kvsieve" and about["Version"] == kvsieve.__version__
    assert about["License-Expression"] == PROJECT["project"]["license"]
    assert about["Description-Content-Type"] == "text/markdown" and shown_readme().strip() in text
    required = [each for each in about.get_all("Requires-Dist") if "extra ==" not in each]
    assert sorted(re.split(r"[<>=]", each)[0] for each in required) == [
        "numpy", "rich", "safetensors", "torch", "transformers", "typer"
    ]  # fmt: skip


@builds
@pytest.mark.slow
def test_the_source_archive_has_the_tests_and_no_results(tmp_path):
    made = build("sdist", tmp_path)
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "Makefile"} <= names
    assert {"tests/conftest.py", "tests/support/small.py", "src/kvsieve/py.typed", "benchmarks/pages.py"} <= names
    assert not [name for name in names if name.startswith(("benchmarks/results", ".ci")) or name.endswith(".png")]
    assert made.stat().st_size < 3_100_000
