"""Docstrings open with a verb or a noun phrase, which an editor's hover shows first."""

from __future__ import annotations

import ast
import re

from source_tree import modules

OPENINGS = re.compile(r"(What|Whether|How|The same)\b")


def openings(tree: ast.Module) -> list[str]:
    """First lines of the docstrings that open with a question word or "The same"."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text.splitlines()[0] for text in found if text is not None and OPENINGS.match(text)]


def test_docstrings_open_with_a_verb_or_a_noun_phrase():
    found = {file: lines for file, tree in modules().values() if (lines := openings(tree))}
    assert found == {}


def test_openings_are_found():
    tree = ast.parse('"""How it is."""\ndef f():\n    """Whatever."""\nclass C:\n    """The same\n\n    as C."""\n')
    assert openings(tree) == ["How it is.", "The same"]
