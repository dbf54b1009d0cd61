"""Docstrings open with a verb or a noun phrase, which an editor's hover shows first."""

from __future__ import annotations

import ast
import re

from source_tree import modules

OPENINGS = re.compile(r"(What|Whether|How|The same)\b")
# Files, by package or top-level module, with docstrings that open so still. To be emptied; one without any fails.
KNOWN = {
    "methods allocators.py",
    "methods base.py",
    "methods duoattention.py",
    "methods dynamickv.py",
    "methods kvzip.py",
    "methods lagkv.py",
    "methods per_turn.py",
    "methods readers.py",
    "plans.py plans.py",
    "registry.py registry.py",
}


def openings(tree: ast.Module) -> list[str]:
    """First lines of the docstrings that open with a question word or "The same"."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text.splitlines()[0] for text in found if text is not None and OPENINGS.match(text)]


def test_docstrings_open_with_a_verb_or_a_noun_phrase():
    found: dict[str, list[str]] = {}
    for file, tree in modules().values():
        if lines := openings(tree):
            found.setdefault(f"{file.partition('/')[0]} {file.rpartition('/')[2]}", []).extend(lines)
    assert {file: lines for file, lines in found.items() if file not in KNOWN} == {}
    assert KNOWN - found.keys() == set(), "no longer needed: take it out of KNOWN"


def test_openings_are_found():
    tree = ast.parse('"""How it is."""\ndef f():\n    """Whatever."""\nclass C:\n    """The same\n\n    as C."""\n')
    assert openings(tree) == ["How it is.", "The same"]
