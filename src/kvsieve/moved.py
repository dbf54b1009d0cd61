"""Modules by the names they had before they moved, importable for one release with a warning.

To be removed with version 0.5.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_WINGS = {
    "planning": (
        "budget defaults forms loading named parameters plans profiles protection quantities registry roles segments "
        "settled specs suggestions turns"
    ),
    "lab": "advise bench calibrate client eval tasks traffic",
}
MOVED = {f"kvsieve.{name}": f"kvsieve.{wing}.{name}" for wing, names in _WINGS.items() for name in names.split()}
MOVED["kvsieve.kept"] = "kvsieve.hf.kept_tokens"


class OldNames(MetaPathFinder, Loader):
    """Finds modules under their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _place(fullname) is not None else None

    def exec_module(self, module: ModuleType) -> None:
        place = _place(module.__name__)
        assert place is not None
        text = f"'{module.__name__}' has moved to '{place}'; the old name goes with kvsieve 0.5"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        # The import statement takes the module from here, not the empty one made for the old name.
        sys.modules[module.__name__] = importlib.import_module(place)


def _place(name: str) -> str | None:
    """Return the new name of a module that had this name, or None for any other name."""
    parts = name.split(".")
    wing = MOVED.get(".".join(parts[:2]))
    return None if wing is None else ".".join([wing, *parts[2:]])
