"""Loading by name of what is above: methods, also those of installed packages, and the sizes of models' caches."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

from kvsieve.errors import KvsieveWarning

# The package whose import registers kvsieve's own methods.
BUILT_IN = "kvsieve.methods"
# The module that makes entries of budgets in bytes, for which transformers is needed.
_MEMORY = "kvsieve.hf.model.memory"
_PROVIDED: dict[str, Callable[..., Any]] = {}
# Entry points of other packages: their names are those of methods, loading one registers it.
ENTRY_POINTS = "kvsieve.methods"
# The canonical name of every registered method -> the module that registered it.
REGISTERED: dict[str, str] = {}
_loading = threading.RLock()
_loaded = False


def canonical(name: str) -> str:
    """Return a method's name without what may be written either way: case, hyphens, underscores and spaces."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def load_methods() -> None:
    """Register every method: kvsieve's own and, once, those that installed packages name as entry points.

    One that cannot be loaded is left out with a KvsieveWarning that names its package.
    """
    global _loaded
    with _loading:
        importlib.import_module(BUILT_IN)
        if _loaded:
            return
        _loaded = True
        for point in metadata.entry_points(group=ENTRY_POINTS):
            why = _why_not_loaded(point)
            if why is not None:
                warn_left_out("method", point, why)


def warn_left_out(what: str, point: metadata.EntryPoint, why: str) -> None:
    """Warn (KvsieveWarning) that a method or task of another package is left out."""
    package = point.dist.name if point.dist is not None else point.value
    warnings.warn(
        f"the {what} {point.name!r} of the package {package!r} is left out: {why}; update or uninstall that package",
        KvsieveWarning,
        stacklevel=4,
    )


F = TypeVar("F", bound=Callable[..., Any])


def provides(what: str) -> Callable[[F], F]:
    """Return the decorator of a function that modules below call by what it does; see `provided`."""

    def add(function: F) -> F:
        _PROVIDED[what] = function
        return function

    return add


def provided(what: str) -> Callable[..., Any]:
    """Return the function that a module above provides: "settle" of a Plan's parameters, "fit_budgets" in bytes."""
    if what == "fit_budgets":
        importlib.import_module(_MEMORY)
    else:
        load_methods()
    return _PROVIDED[what]


def _why_not_loaded(point: metadata.EntryPoint) -> str | None:
    try:
        point.load()
    except Exception as error:
        return f"{point.value} raises {type(error).__name__}: {error}"
    if REGISTERED.get(canonical(point.name), BUILT_IN).startswith(BUILT_IN):
        return f"{point.value} registers no method of that name"
    return None
