"""How hf/ is built: storeys, one call of the decoder, no messages left on the cache, nobody's private names."""

from __future__ import annotations

import ast
import traceback
from collections import defaultdict

import pytest
import torch

import kvsieve
from source_tree import imports, modules
from tiny_models import build

# Lowest first; a module imports from lower storeys and from its own package.
STOREYS = (
    ("compat", "inputs", "shape", "kept_tokens"),
    ("kinds",),
    ("model", "cache"),
    ("forward",),
    ("decode",),
    ("runtime",),
    ("hooks", "prompt", "persist", "kept"),
    ("drafts", "edit"),
    ("generate",),
    ("reuse",),
    ("join", "chat"),
    ("sieve",),
    ("attach",),
)
# What a cache once carried from a driver to the next pass.
MESSAGES = "awaits_prompt more_chunks in_flight given_answer rehearsed own_plan reduces waiting reordered prompt_end"


def inside(module: str) -> str | None:
    """The package or module of hf that a module belongs to."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["kvsieve", "hf"] and len(parts) > 2 else None


def trees():
    return {module: tree for module, (_, tree) in modules().items() if inside(module)}


def test_imports_within_hf_go_downwards():
    level = {name: number for number, storey in enumerate(STOREYS) for name in storey}
    found = {inside(module) for module in modules()} - {None}
    assert found == set(level)
    wrong = [
        f"{module} -> {target}"
        for module, targets in imports().items()
        for target in targets
        if (here := inside(module)) and (there := inside(target)) and here != there and level[there] >= level[here]
    ]
    assert wrong == []


def test_the_decoder_is_called_in_one_place():
    calls = [
        (module, ast.unparse(node.func))
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("decoder", "model", "forward")
        and (node.args or node.keywords)
    ]
    # The recorded pass is what stands in for the decoder's forward.
    assert sorted(calls) == [
        ("kvsieve.hf.decode.recorded_pass", "self.forward"),
        ("kvsieve.hf.runtime", "self.decoder"),
        ("kvsieve.hf.runtime", "self.model"),
    ]


def test_a_cache_carries_no_messages():
    with kvsieve.attach(build("llama"), kvsieve.plan("full")) as sieve:
        cache = sieve.new_cache()
    known = vars(cache).keys() | vars(cache.conversation).keys() | vars(type(cache)).keys()
    assert not known & set(MESSAGES.split())


def test_nobody_uses_the_private_names_of_another_module():
    owners = defaultdict(set)
    for module, (_, tree) in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                owners[node.name].add(module)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                owners[node.id].add(module)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owners[node.attr].add(module)
    wrong = []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvsieve"):
                names = [alias.name for alias in node.names]
            for name in names:
                private = name.startswith("_") and not name.startswith("__")
                if private and owners[name] and module not in owners[name]:
                    wrong.append(f"{module}: {ast.unparse(node)}")
    assert wrong == []


@pytest.mark.parametrize("name", ["snapkv", "gemfilter", "fastkv"])
def test_the_way_of_a_prompt_to_the_decoder_is_short(name, monkeypatch):
    """At most ten functions of ours, of which prompt/read.py is the first driver."""

    class Reached(Exception):
        pass

    def reached(*args, **kwargs):
        raise Reached

    model = build("llama")
    monkeypatch.setattr(model.get_decoder(), "forward", reached)
    with kvsieve.attach(model, kvsieve.plan(name, budget=40, paper=True)) as sieve, pytest.raises(Reached) as left:
        sieve.generate(torch.arange(2, 90)[None], chunk=30, max_new_tokens=2)
    frames = [each for each in traceback.extract_tb(left.tb) if "/kvsieve/hf/" in each.filename]
    passed = [each.name for each in frames if each.name not in ("__call__", "decorate_context")]
    assert passed[0] == "generate" and len(passed) <= 10, passed
    drivers = [each.filename for each in frames if "/hf/prompt/" in each.filename]
    assert drivers[0].endswith("hf/prompt/read.py")
