"""Registration of methods: kvsieve's own, and those of installed packages."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvsieve.errors import KvsieveWarning

if TYPE_CHECKING:
    from importlib import metadata

# The package with kvsieve's own methods.
BUILT_IN = "kvsieve.methods"
# Entry points of other packages: their names are those of methods, loading one registers it.
ENTRY_POINTS = "kvsieve.methods"
# The canonical name of every registered method -> the module that registered it.
REGISTERED: dict[str, str] = {}
# Functions of modules above, by what they do for those below: "load_methods", and "settle" for `Plan.for_model`.
PROVIDED: dict[str, Callable[..., Any]] = {}
_loading = threading.RLock()
_loaded = False


def canonical(name: str) -> str:
    """Normalize a method's name: case, hyphens, underscores and spaces."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def load_methods() -> None:
    """Register kvsieve's methods and, once, those of installed packages by entry points.

    A method that cannot be loaded is skipped with a KvsieveWarning that names its package.
    """
    global _loaded
    with _loading:
        PROVIDED["load_methods"]()
        if _loaded:
            return
        _loaded = True
        from importlib import metadata

        for point in metadata.entry_points(group=ENTRY_POINTS):
            why = _why_not_loaded(point)
            if why is not None:
                warn_left_out("method", point, why)


def warn_left_out(what: str, point: metadata.EntryPoint, why: str) -> None:
    """Warn (KvsieveWarning) that a method or task of another package is skipped."""
    package = point.dist.name if point.dist is not None else point.value
    warnings.warn(
        f"the {what} {point.name!r} of the package {package!r} is left out: {why}; update or uninstall that package",
        KvsieveWarning,
        stacklevel=4,
    )


def _why_not_loaded(point: metadata.EntryPoint) -> str | None:
    try:
        point.load()
    except Exception as error:
        return f"{point.value} raises {type(error).__name__}: {error}"
    if REGISTERED.get(canonical(point.name), BUILT_IN).startswith(BUILT_IN):
        return f"{point.value} registers no method of that name"
    return None
