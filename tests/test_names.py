"""One name per thing: no two classes of the package share a name."""

from __future__ import annotations

import ast

from source_tree import modules


def test_no_two_classes_share_a_name():
    """A private class counts under its name without the underscore: `_Step` beside `Step` misleads as well."""
    places: dict[str, list[str]] = {}
    for module, (_, tree) in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{module}.{node.name}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_names_are_nouns_and_verbs():
    """A pronoun or a participle tells a reader nothing of a value; `describe` and the field's nouns do."""
    found = {}
    for module, (_, tree) in modules().items():
        for node in ast.walk(tree):
            names = [getattr(node, field, None) for field in ("id", "arg", "attr", "name")]
            if {"told", "_told"}.intersection(name for name in names if isinstance(name, str)):
                found.setdefault(module, []).append(node.lineno)
    assert found == {}
