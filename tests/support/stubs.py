"""Types of the public API with the parameters of every method, for editors and type checkers.

python tests/support/stubs.py > src/kvsieve/__init__.pyi
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator

import kvsieve
from kvsieve.planning.registry import MethodInfo, list_methods, method_info

HEAD = '''"""Types of kvsieve's public names, made by `python tests/support/stubs.py`; do not edit."""

from typing import Any, Literal, TypedDict, Unpack, overload

from kvsieve import methods as methods
from kvsieve import models as models
from kvsieve.errors import KvsieveError as KvsieveError
from kvsieve.errors import KvsieveWarning as KvsieveWarning
from kvsieve.hf.attach import Sieve as Sieve
from kvsieve.hf.attach import attach as attach
from kvsieve.hf.cache.cache import SieveCache as SieveCache
from kvsieve.lab.eval.evaluator import Evaluator as Evaluator
from kvsieve.planning.budget import Budget as Budget
from kvsieve.planning.grammars import Grammar as Grammar
from kvsieve.planning.plans import Plan as Plan
from kvsieve.planning.profiles import Profile
from kvsieve.planning.registry import list_methods as list_methods
from kvsieve.planning.registry import method_info as method_info
from kvsieve.planning.registry import register_method as register_method
from kvsieve.planning.roles import Codec, SparsePrefill

__version__: str
__all__: list[str]
'''
# Annotations that the file above can name; parameters with others take anything.
KNOWN = {"int", "float", "str", "bool", "None", "Budget", "Literal", "tuple"}
# Parameters that come from the registry or the model, or that take more than a field's type.
TYPES = {
    "codec": "Codec | str | None",
    "rest": "Codec | str | None",
    "prefill": "SparsePrefill | str | None",
    "merge": "str | None",
    "skip_layers": "int | tuple[int, ...] | str",
    "floor": "int",
    "every": "int | None",
    "answer": "Budget | str | float | None",
    "grows": "bool",
    "newest": "bool",
    "sparse_questions": "bool",
    "share": "int | tuple[int, ...]",
    "budget": "Budget | str | float",
    "profile": "Profile | str | None",
    "paper": "bool",
}
# Parameters that many methods share: the group's name, the group that it extends, and the names it adds.
GROUPS = {
    "_Parts": ("TypedDict", ("codec", "rest", "prefill", "merge")),
    "_Acts": ("_Parts", ("skip_layers", "floor")),
    "_Evicts": ("_Acts", ("every",)),
    "_Ranks": ("_Evicts", ("answer", "grows")),
    "_Reads": ("_Acts", ("newest", "sparse_questions", "share")),
}


def members(group: str) -> set[str]:
    """Return the names of a group, with those of the groups that it extends."""
    base, names = GROUPS[group]
    return {*names, *(members(base) if base in GROUPS else ())}


def annotation(info: MethodInfo, name: str) -> str:
    """Return the type of a parameter as text."""
    kind = typing.get_type_hints(info.make).get(name)
    if kind is None or name in ("budget", "profile"):
        return TYPES.get(name, "Any")
    text = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    text = re.sub(r"[\w.]+\.(\w+)", r"\1", text)
    names = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"'[^']*'", "", text)))
    return text.replace("'", '"') if names <= KNOWN else "Any"


def groups() -> Iterator[str]:
    """Yield the classes of the groups."""
    for group, (base, names) in GROUPS.items():
        yield "\n".join([f"class {group}({base}, total=False):", *(f"    {name}: {TYPES[name]}" for name in names), ""])


def overloads() -> Iterator[str]:
    """Yield a signature of `plan` per method, and one for names with parameters behind them."""
    for name in list_methods():
        info = method_info(name)
        taken = {*info.parameters, *members("_Parts")}
        group = max((group for group in GROUPS if members(group) <= taken), key=lambda group: len(members(group)))
        own = [f"    {each}: {annotation(info, each)} = ...," for each in info.parameters if each not in members(group)]
        head = ["@overload", "def plan(", f'    method: Literal["{name}"],', *(["    *,", *own] if own else ())]
        yield "\n".join([*head, f"    **shared: Unpack[{group}],", ") -> Plan: ..."])
    yield "@overload\ndef plan(method: str, **parameters: Any) -> Plan: ..."


def stub() -> str:
    """Return the file."""
    missing = [name for name in kvsieve.__all__ if not re.search(rf"\b{name}\b", HEAD) and name != "plan"]
    assert not missing, missing
    return "\n".join([HEAD, *groups(), *overloads(), ""])


if __name__ == "__main__":
    print(stub(), end="")
