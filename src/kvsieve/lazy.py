"""Imports on first use: torch for modules that make plans without it, and names of packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
    from torch.nn import functional as functional


class _Lazy:
    """Placeholder for torch, or a part of it, in kvsieve's modules that import it from here."""

    def __init__(self, module: str, name: str = "") -> None:
        self._module = module
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__version__":
            # Aliases such as tuple[Tensor, ...] read dunder attributes on creation.
            raise AttributeError(attribute)
        return getattr(self._load(), attribute)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self._load())

    def _found(self) -> Any:
        module = importlib.import_module(self._module)
        return vars(module)[self._name] if self._name else module

    def _load(self) -> Any:
        """Replace placeholders by torch and its parts, so that later uses cost nothing; return this part."""
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "kvsieve":
                names = vars(module)
                names.update({key: part._found() for key, part in list(names.items()) if isinstance(part, _Lazy)})
        return self._found()


_PARTS = {"torch": _Lazy("torch"), "Tensor": _Lazy("torch", "Tensor"), "functional": _Lazy("torch.nn.functional")}
globals().update({name: part._found() for name, part in _PARTS.items()} if "torch" in sys.modules else _PARTS)


def lazy_names(package: str, **names: tuple[str, ...]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its names, listed by module, on first use."""
    homes = {name: module for module, listed in names.items() for name in listed}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        vars(sys.modules[package])[name] = found
        return found

    return find
