"""Checks before a compiled call that modules are as the call assumes: a few calls for all of a decoder's modules."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Self

from torch import Tensor

from kvsieve.hf.decode.narrow import NarrowWeight

# A dictionary, such as a module's parameters, a name, and the object there; None: the name is absent, or None is there.
Fact = tuple[dict[str, Any], str, Any]

_VERSION = operator.attrgetter("_version")
_COPY = operator.attrgetter("copy")


class SameObjects:
    """Objects that dictionaries have under given names."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = list(facts)
        self._dicts = [held for held, _, _ in self.facts]
        self._names = [name for _, name, _ in self.facts]
        self._objects = [found for _, _, found in self.facts]

    def hold(self) -> bool:
        """Return True if all are the same objects as at first."""
        return all(map(operator.is_, map(dict.get, self._dicts, self._names), self._objects))


class Wiring(SameObjects):
    """Modules' parts and forwards, and hooks on them.

    Args:
        facts: parts and forwards.
        hooks: dictionaries of the modules' hooks, by number.
        harmless: numbers of hooks that change nothing and look at nothing; they may become more.
    """

    def __init__(self, facts: Iterable[Fact], hooks: Iterable[dict[int, Any]], harmless: set[int]) -> None:
        super().__init__(facts)
        self.hooks = list(hooks)
        self._harmless = harmless

    def hold(self) -> bool:
        """Return True if modules are wired as at first, and nobody looks at what passes through them."""
        return super().hold() and (not any(self.hooks) or all(map(self._harmless.issuperset, self.hooks)))


class Weights(SameObjects):
    """Weights that a kernel reads at known addresses.

    Args:
        facts: the tensors, and other facts about their modules.
        narrow: copies that are read instead of weights, all of which exist that will.
    """

    def __init__(self, facts: Iterable[Fact], narrow: Iterable[NarrowWeight]) -> None:
        super().__init__(facts)
        self.narrow = list(narrow)
        self._tensors = [found for _, _, found in self.facts if isinstance(found, Tensor)]
        self._addresses = self._found_addresses()
        self._state = self._copies()

    @classmethod
    def joined(cls, several: Sequence[Weights]) -> Self:
        """Return the weights of several as one."""
        return cls(chain(*(one.facts for one in several)), chain(*(one.narrow for one in several)))

    def hold(self) -> bool:
        """Return True if they are in the same memory, and copies have their numbers."""
        if not super().hold() or self._found_addresses() != self._addresses:
            return False
        return all(map(Tensor.is_contiguous, self._tensors)) and self._copies() == self._state

    def _found_addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))

    def _copies(self) -> tuple[list[object], list[int]]:
        """Return the copies, and numbers of the writes to the weights that torch counts."""
        if not self.narrow:
            return [], []
        return list(map(_COPY, self.narrow)), list(map(_VERSION, self._tensors))
