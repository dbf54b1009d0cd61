"""Files, functions and parameter lists stay small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

from source_tree import SOURCE, modules

FILE, FUNCTION, PARAMETERS = 400, 60, 8

# Options of a public call, of which its user names those that are wanted: file and function.
PUBLIC_OPTIONS = {"hf/sieve.py generate"}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its file and name."""
    for file, tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{file} {node.name}", node


def has_given_signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command's options, or the pointers and strides of a Triton kernel: what calls it says what they are."""
    kernel = any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
    return kernel or (name.startswith("cli/") and name.endswith("_command"))


def lines(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the docstring, which may list parameters one per line."""
    first = node.body[0].lineno if has_given_signature(name, node) else node.lineno
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    left_out = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
    return (node.end_lineno or first) - first + 1 - left_out


def parameters(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if has_given_signature(name, node):
        return 0
    given = node.args
    named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    count = len(named) + (given.vararg is not None) + (given.kwarg is not None)
    return count - (named[:1] in (["self"], ["cls"]))


def compare(sizes: dict[str, int], limit: int, given: Set[str] = frozenset()) -> None:
    over = {name: size for name, size in sizes.items() if size > limit}
    assert {name: size for name, size in over.items() if name not in given} == {}, f"more than {limit}"
    assert given - over.keys() == set(), "no longer needed: take it out of the exceptions"


def largest(sizes: Iterator[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in sizes:
        found[name] = max(size, found.get(name, 0))
    return found


def test_files():
    files = [file for file, _ in modules().values()]
    compare({file: len((SOURCE / file).read_text(encoding="utf-8").splitlines()) for file in files}, FILE)


def test_functions():
    compare(largest((name, lines(name, node)) for name, node in functions()), FUNCTION)


def test_parameters():
    compare(largest((name, parameters(name, node)) for name, node in functions()), PARAMETERS, PUBLIC_OPTIONS)
