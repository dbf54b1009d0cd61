"""Copying and pickling of the objects of a plan: complete, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from torch import nn

from kvsieve.errors import KvsieveError


class Unpicklable:
    """Base of objects that cannot be pickled: that raises KvsieveError with advice."""

    _instead = ""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise KvsieveError(f"a {type(self).__name__} cannot be pickled: {self._instead}")


class Forked(Unpicklable):
    """Base of objects that copy.copy and copy.deepcopy copy by `fork`; pickling them raises KvsieveError."""

    def fork(self) -> Any:
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self.fork()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.fork()


class _Refusal:
    """Replaces a module's copy methods."""

    def __call__(self, *args: Any) -> NoReturn:
        raise KvsieveError(
            "the model has a plan attached, which a copy or pickle of it, or of its parts, would take along: copy or "
            "pickle it outside of the `with` block"
        )


@contextlib.contextmanager
def uncopied(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Refuse to pickle or deepcopy these modules within the block."""
    namespaces = [vars(module) for module in modules]
    names = ("__reduce_ex__", "__deepcopy__")
    refusal = _Refusal()
    try:
        for namespace in namespaces:
            namespace.update(dict.fromkeys(names, refusal))
        yield
    finally:
        for namespace in namespaces:
            for name in names:
                namespace.pop(name, None)
