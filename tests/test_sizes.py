"""Files, functions and parameter lists stay small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from source_tree import SOURCE, modules

FILE, FUNCTION, PARAMETERS = 300, 60, 8

# What still exceeds: package or top-level module, and file or function in it. To be emptied; an entry that no longer
# exceeds fails the test.
KNOWN_FILES = {
    "hf chat.py",
}
KNOWN_FUNCTIONS = {
    "kernels attend",
    "kernels split_kernel",
}
KNOWN_PARAMETERS = {
    "hf generate",
    "kernels attend",
    "kernels kv_row_attention",
}


def unit(file: str) -> str:
    return file.partition("/")[0]


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name here."""
    for file, tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{unit(file)} {node.name}", node


def has_given_signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command's options, or the pointers and strides of a Triton kernel: what calls it says what they are."""
    kernel = any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
    return kernel or (name.startswith("cli ") and name.endswith("_command"))


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


def compare(sizes: dict[str, int], limit: int, known: set[str]) -> None:
    over = {name: size for name, size in sizes.items() if size > limit}
    assert {name: size for name, size in over.items() if name not in known} == {}, f"more than {limit}"
    assert known - over.keys() == set(), "no longer needed: take it out of the known ones"


def largest(sizes: Iterator[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in sizes:
        found[name] = max(size, found.get(name, 0))
    return found


def test_files():
    files = (file for file, _ in modules().values())
    sizes = ((f"{unit(file)} {file.rpartition('/')[2]}", file) for file in files)
    compare(
        largest((n, len((SOURCE / file).read_text(encoding="utf-8").splitlines())) for n, file in sizes),
        FILE,
        KNOWN_FILES,
    )


def test_functions():
    compare(largest((name, lines(name, node)) for name, node in functions()), FUNCTION, KNOWN_FUNCTIONS)


def test_parameters():
    compare(largest((name, parameters(name, node)) for name, node in functions()), PARAMETERS, KNOWN_PARAMETERS)
