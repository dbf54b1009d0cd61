"""The direction of imports, and that importing has no side effects."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from source_tree import circles, imports, modules

# Lowest first. A module imports from lower storeys and from its own package, not from others on its storey. "kvsieve"
# is the package itself, the public API: what it provides to modules below (see `loading`) it imports. Entry points are
# not imports.
STOREYS = (
    ("folders", "lazy"),
    ("version", "text", "forms", "types", "display", "devices", "kernels"),
    ("errors",),
    (
        "loading",
        "parameters",
        "quantities",
        "suggestions",
        "specs",
        "profiles",
        "turns",
        "detokenize",
        "client",
        "core",
        "models",
        "report",
        "protection",
    ),
    ("budget", "defaults", "kept"),
    ("segments", "roles", "unset"),
    ("cache", "plan_files"),
    ("attention",),
    ("plans",),
    ("registry",),
    ("settled", "tasks"),
    ("named",),
    ("hf", "methods"),
    ("decoding", "store"),
    ("traffic",),
    ("eval",),
    ("kvsieve",),
    ("bench", "calibrate", "kvsieve_vllm"),
    ("advise", "serve"),
    ("cli",),
    ("__main__",),
)
# What still goes upwards or sideways: (from, to). To be emptied; one that no longer occurs fails the test.
KNOWN_UPWARD: set[tuple[str, str]] = set()
# Packages that still have modules in a circle, one entry per circle. To be emptied in the same way.
KNOWN_CIRCLES = set()
# transformers' classes are known above and in hf; below it there are tensors only.
WITHOUT_TRANSFORMERS = ("kernels", "core", "cache", "attention", "methods")


def unit(module: str) -> str:
    """The package or top-level module that a module belongs to; the plugin is one."""
    package, *inner = module.split(".")
    return inner[0] if package == "kvsieve" and inner else package


def test_every_package_has_one_storey():
    named = [name for storey in STOREYS for name in storey]
    assert sorted(named) == sorted({unit(module) for module in modules()})


def test_imports_go_downwards():
    level = {name: number for number, storey in enumerate(STOREYS) for name in storey}
    wrong: dict[tuple[str, str], list[str]] = {}
    for module, targets in imports().items():
        for target in targets:
            here, there = unit(module), unit(target)
            if here != there and level[there] >= level[here]:
                wrong.setdefault((here, there), []).append(f"{module} -> {target}")
    assert {pair: each for pair, each in wrong.items() if pair not in KNOWN_UPWARD} == {}
    assert KNOWN_UPWARD - wrong.keys() == set(), "no longer needed: take it out of KNOWN_UPWARD"


def test_nobody_imports_a_higher_floor_by_its_name():
    """Modules that import by name have no name of a module above them in a string."""
    level = {name: number for number, storey in enumerate(STOREYS) for name in storey}
    found = []
    for module, (_, tree) in modules().items():
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if any(call.endswith(("import_module", "__import__")) for call in calls):
            texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} & modules().keys() - {
                "kvsieve"
            }
            found += [f"{module} -> {text}" for text in texts if level[unit(text)] > level[unit(module)]]
    assert found == []


def test_no_modules_import_each_other_in_a_circle():
    found = {frozenset(unit(module) for module in circle): circle for circle in circles(imports())}
    assert {packages: circle for packages, circle in found.items() if packages not in KNOWN_CIRCLES} == {}
    assert KNOWN_CIRCLES - found.keys() == set(), "no longer needed: take it out of KNOWN_CIRCLES"


def test_circles_are_found():
    graph = {name: frozenset(targets) for name, targets in (("a", "bc"), ("b", "c"), ("c", "b"), ("d", "da"))}
    assert sorted(map(sorted, circles(graph))) == [["b", "c"], ["d"]]


@pytest.mark.parametrize("package", WITHOUT_TRANSFORMERS)
def test_what_hf_is_built_on_knows_no_transformers(package):
    for module, (_, tree) in modules().items():
        if unit(module) != package:
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] == "transformers"], module


@pytest.mark.slow
def test_importing_changes_nothing_in_transformers_and_makes_no_kernel():
    program = (
        "import sys, kvsieve; assert not any(name.startswith('kvsieve.kernels.') for name in sys.modules); "
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as known; "
        "assert 'kvsieve' not in known"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
