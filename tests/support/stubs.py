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

from typing import Any, Literal, overload

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
# Parameters that every method takes, or that come from the model or the registry.
TYPES = {
    "codec": "Codec | str | None",
    "rest": "Codec | str | None",
    "prefill": "SparsePrefill | str | None",
    "merge": "str | None",
    "budget": "Budget | str | float",
    "profile": "Profile | str | None",
    "paper": "bool",
    "floor": "int",
    "every": "int | None",
    "newest": "bool",
    "sparse_questions": "bool",
}


def annotation(info: MethodInfo, name: str) -> str:
    """Return the type of a parameter as text."""
    if name in TYPES:
        return TYPES[name]
    kind = typing.get_type_hints(info.make).get(name)
    if kind is None:
        return "Any"
    text = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    text = re.sub(r"[\w.]+\.(\w+)", r"\1", text)
    names = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"'[^']*'", "", text)))
    return text.replace("'", '"') if names <= KNOWN else "Any"


def overloads() -> Iterator[str]:
    """Yield a signature of `plan` per method, and one for names with parameters behind them."""
    for name in list_methods():
        info = method_info(name)
        shared = ("codec", "rest", "prefill", "merge")
        own = [each for each in info.parameters if each not in shared]
        lines = [f"    {each}: {annotation(info, each)} = ...," for each in (*own, *shared)]
        yield "\n".join(
            ["@overload", "def plan(", f'    method: Literal["{name}"],', "    *,", *lines, ") -> Plan: ..."]
        )
    yield "@overload\ndef plan(method: str, **parameters: Any) -> Plan: ..."


def stub() -> str:
    """Return the file."""
    missing = [name for name in kvsieve.__all__ if not re.search(rf"\b{name}\b", HEAD) and name != "plan"]
    assert not missing, missing
    return "\n".join([HEAD, *overloads(), ""])


if __name__ == "__main__":
    print(stub(), end="")
