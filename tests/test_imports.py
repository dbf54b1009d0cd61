"""The direction of imports, and that importing has no side effects."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "kvsieve"
LEAVES = set("types errors budget parameters profiles defaults segments turns text kernels display".split())
ALLOWED = {
    "core": {"core"} | LEAVES,
    "cache": {"core", "cache"} | LEAVES,
    "attention": {"core", "attention"} | LEAVES,
    "methods": {"core", "methods", "plans", "registry", "roles"} | LEAVES,
    "hf": {"core", "cache", "attention", "methods", "plans", "registry", "roles", "hf"} | LEAVES,
}


def imports(package: str) -> dict[str, set[str]]:
    """Modules imported anywhere in the files of a package."""
    found: dict[str, set[str]] = {}
    for file in sorted((SOURCE / package).rglob("*.py")):
        names = found.setdefault(str(file.relative_to(SOURCE)), set())
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: import by full name"
                base = node.module or ""
                names.update(f"kvsieve.{alias.name}" for alias in node.names) if base == "kvsieve" else names.add(base)
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_inwards(package):
    for file, names in imports(package).items():
        ours = {name.split(".")[1] for name in names if name.startswith("kvsieve.")}
        assert ours <= ALLOWED[package], file
        if package != "hf":
            assert not {name for name in names if name.partition(".")[0] == "transformers"}, file


@pytest.mark.slow
def test_importing_changes_nothing_in_transformers_and_makes_no_kernel():
    program = (
        "import sys, kvsieve; assert not any(name.startswith('kvsieve.kernels.') for name in sys.modules); "
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as known; "
        "assert 'kvsieve' not in known"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
