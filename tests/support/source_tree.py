"""The modules of src/kvsieve and of plugins/vllm as syntax trees, for the tests of their layout."""

from __future__ import annotations

import ast
import functools
import os
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "kvsieve"
PLUGIN = SOURCE.parents[1] / "plugins" / "vllm" / "kvsieve_vllm"
# A source distribution has neither committed results nor pictures.
HAS_RESULTS = (SOURCE.parents[1] / "benchmarks" / "results").is_dir()
needs_results = pytest.mark.skipif(not HAS_RESULTS, reason="committed results are in the repository only")


@functools.cache
def modules() -> dict[str, tuple[str, ast.Module]]:
    """Full name -> file relative to src/kvsieve and syntax tree; a package has the name of its folder."""
    found = {}
    for file in sorted((*SOURCE.rglob("*.py"), *PLUGIN.rglob("*.py"))):
        root = PLUGIN if file.is_relative_to(PLUGIN) else SOURCE
        name = ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = os.path.relpath(file, SOURCE), ast.parse(file.read_text(encoding="utf-8"))
    return found


@functools.cache
def imports() -> dict[str, frozenset[str]]:
    """Module -> modules of these that it imports: annotation-only (TYPE_CHECKING) and late imports count."""
    known = modules()
    found = {}
    for name, (_, tree) in known.items():
        named = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: import by full name"
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    named.add(inner if inner in known else str(node.module))
        found[name] = frozenset(named & known.keys())
    return found


def circles(graph: dict[str, frozenset[str]]) -> list[set[str]]:
    """Strongly connected components of two or more nodes, and single nodes with an edge to themselves (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = stack.index(node)
            component = set(stack[at:])
            del stack[at:]
            if len(component) > 1 or node in graph[node]:
                found.append(component)

    for node in graph:
        if node not in order:
            visit(node)
    return found
