"""The direction of imports, and that importing has no side effects."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvsieve.moved import MOVED
from source_tree import circles, imports, modules

# Lowest first. A module imports from lower storeys and from its own package, not from others on its storey. "kvsieve"
# is the package itself, the public API: what it provides to modules below (see `loading`) it imports. Entry points are
# not imports.
Storeys = tuple[tuple[str, ...], ...]
STOREYS: Storeys = (
    ("folders", "lazy", "moved"),
    ("version", "text", "types", "devices", "kernels"),
    ("errors",),
    ("core", "models", "detokenize", "report"),
    ("planning",),
    ("cache",),
    ("attention",),
    ("hf", "methods"),
    ("decoding", "shared", "store"),
    ("lab",),
    ("kvsieve",),
    ("serve", "kvsieve_vllm"),
    ("cli",),
    ("__main__",),
)
# The same within planning/ and lab/.
WINGS: dict[str, Storeys] = {
    "planning": (
        ("forms", "grammars", "loading", "parameters", "quantities", "suggestions", "specs", "profiles", "protection"),
        ("budget", "defaults", "joins", "turns"),
        ("documents", "segments", "roles", "unset"),
        ("answers", "drafts"),
        ("plan_files",),
        ("plans",),
        ("registry",),
        ("settled",),
        ("named",),
    ),
    "lab": (("client", "tasks", "traffic"), ("eval",), ("bench", "calibrate"), ("advise",)),
}
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


def upward(storeys: Storeys, place: Callable[[str], str | None]) -> dict[tuple[str, str], list[str]]:
    """Imports that do not go downwards among the rooms that `place` gives for modules."""
    level = {name: number for number, storey in enumerate(storeys) for name in storey}
    wrong: dict[tuple[str, str], list[str]] = {}
    for module, targets in imports().items():
        for target in targets:
            here = place(module)
            there = place(target)
            if here and there and here != there and level[there] >= level[here]:
                wrong.setdefault((here, there), []).append(f"{module} -> {target}")
    return wrong


def test_imports_go_downwards():
    wrong = upward(STOREYS, unit)
    assert {pair: each for pair, each in wrong.items() if pair not in KNOWN_UPWARD} == {}
    assert KNOWN_UPWARD - wrong.keys() == set(), "no longer needed: take it out of KNOWN_UPWARD"


@pytest.mark.parametrize("wing", WINGS)
def test_imports_within_a_wing_go_downwards(wing):
    def inside(module: str) -> str | None:
        parts = module.split(".")
        return parts[2] if parts[1:2] == [wing] and len(parts) > 2 else None

    named = [name for storey in WINGS[wing] for name in storey]
    assert sorted(named) == sorted({inside(module) for module in modules()} - {None})
    assert upward(WINGS[wing], inside) == {}


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


@pytest.mark.parametrize("old, new", MOVED.items())
def test_modules_import_by_the_names_they_had_with_a_warning(old, new):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=rf"'{old}' has moved to '{new}'"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(new)


def test_names_in_moved_packages_are_the_same_objects():
    from kvsieve.planning.roles.evictor import Evictor

    with pytest.warns(DeprecationWarning, match=r"'kvsieve\.roles\.evictor' has moved"):
        module = importlib.import_module("kvsieve.roles.evictor")
    assert module.Evictor is Evictor
