"""The numbers that the layout of the source holds to, each by a test."""

from __future__ import annotations

import ast

from source_tree import modules


def test_one_policy_goes_on_from_stored_prefixes():
    """One module looks prefixes up and stores them, whoever reads the prompts."""
    verbs = [f"self.store.{name}" for name in ("find", "add", "add_prompt")]
    users = {
        module
        for module, (_, tree) in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in verbs
    }
    assert users == {"kvsieve.hf.reuse"}
