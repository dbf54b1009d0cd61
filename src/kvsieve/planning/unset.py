"""Records of a named plan's parameters: those given, and those filled in from the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsieve.planning.budget import Budget


@dataclass(frozen=True)
class Unset:
    """The named method of a plan and its given parameters, before Plan.for_model fills in the others."""

    method: str
    given: Mapping[str, Any] = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", {name: _lasting(value) for name, value in self.given.items()})


@dataclass(frozen=True)
class SettledParameters:
    """Parameters filled in from the model. parts: name of each source and its parameters."""

    parts: tuple[tuple[str, Mapping[str, Any]], ...]

    @property
    def values(self) -> dict[str, Any]:
        """Parameter -> value; ``base.kernel`` is that of a wrapper's base."""
        return {name: value for _, values in self.parts for name, value in values.items()}

    def __str__(self) -> str:
        texts = []
        for source, values in self.parts:
            texts.append(", ".join(f"{name}={value}" for name, value in values.items()) + f" from {source}")
        return "; ".join(texts)


def _lasting(value: Any) -> Any:
    """Return a parameter in its form after JSON, with lists as tuples."""
    return tuple(value) if isinstance(value, list) else str(value) if isinstance(value, Budget) else value
