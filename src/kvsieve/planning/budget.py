"""Budgets: entries kept per layer and KV head, attention sinks and recent window included."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from kvsieve.errors import PlanError, short
from kvsieve.planning.parameters import MOST
from kvsieve.planning.quantities import format_bytes, is_size, is_tokens, parse_bytes, parse_tokens

_FLOORED = re.compile(r"(.*\S)\s*\(at least (\d+)\)")

# Floor of shares of plans made by name: with 20% of a question of 40 tokens a model answers with a loop
# (benchmarks/answers/floor.py; docs/options.md, "The floor").
FLOOR = 512
# Numbers of entries that may have been meant as a share in percent.
_PERCENT = 100


@dataclass(frozen=True)
class Budget:
    """Number of KV entries that a layer keeps per KV head, including sinks and recent window.

    Give exactly one of `tokens`, `ratio` and `bytes`.

    Attributes:
        tokens: an absolute number of entries, at least 1.
        ratio: a share in (0, 1] of the conversation's tokens so far without padding, measured when a turn's prompt
            ends: ``int(length * ratio)`` entries.
        floor: least entries of a share: shorter conversations are not evicted from. Default 0. Plans made by name have
            512 unless ``floor=`` is given.
        bytes: size of the whole cache of one row of the batch, all layers and heads, at the end of its prompt. It is
            converted to entries when the plan gets its model (Plan.for_model, `attach`).

    Raises:
        PlanError: none or several are given, or one is out of range.
    """

    tokens: int | None = None
    ratio: float | None = None
    bytes: int | None = None
    floor: int = 0

    def __post_init__(self) -> None:
        amounts = (self.tokens, self.ratio, self.bytes)
        if sum(amount is not None for amount in amounts) != 1:
            raise PlanError(
                f"Budget takes exactly one of tokens=, ratio= and bytes=, got tokens={short(self.tokens)}, "
                f"ratio={short(self.ratio)} and bytes={short(self.bytes)}"
            )
        if self.bytes is not None and (type(self.bytes) is not int or self.bytes < 1):
            raise PlanError(f"Budget(bytes=...) must be a whole number of at least 1, got {short(self.bytes)}")
        if self.tokens is not None and (isinstance(self.tokens, bool) or not isinstance(self.tokens, int)):
            raise PlanError(f"Budget(tokens=...) must be a whole number of entries, got {short(self.tokens)}")
        if self.tokens is not None and not 1 <= self.tokens <= MOST:
            raise PlanError(f"Budget(tokens=...) must be at least 1 entry, at most {MOST}, got {short(self.tokens)}")
        number = isinstance(self.ratio, (int, float)) and not isinstance(self.ratio, bool)
        if self.ratio is not None and not (number and 0 < self.ratio <= 1):
            raise PlanError(
                f"Budget(ratio=...) must lie in (0, 1], got {short(self.ratio)}; write 20% as ratio=0.2 or "
                "budget='20%', and a number of entries as tokens=2048 or budget=2048"
            )
        self._check_floor()

    def _check_floor(self) -> None:
        whole = isinstance(self.floor, int) and not isinstance(self.floor, bool)
        if not whole or not 0 <= self.floor <= MOST:
            raise PlanError(
                f"floor must be a whole number of entries from 0 to {MOST}, got {short(self.floor)}; 0 lets a share of "
                "a short prompt drop entries"
            )
        if self.floor and self.ratio is None:
            raise PlanError(
                f"floor is the least that a share keeps, and {self} is no share; leave floor={self.floor} out, or give "
                "a share like '20%'"
            )

    @classmethod
    def parse(cls, value: Budget | str | int | float, name: str = "budget") -> Budget:
        """Parse a budget.

        Args:
            value: ``"20%"`` or ``0.2`` (ratio), ``"2048"``, ``2048`` or ``"2k"`` (tokens), ``"512MiB"`` (bytes), a
                Budget, or its `str`.
            name: the parameter's, for messages.

        Raises:
            PlanError: the value is none of them.
        """
        try:
            return cls._parsed(value)
        except PlanError as error:
            if name == "budget":
                raise
            raise PlanError(f"{name}: {error}") from None

    @classmethod
    def _parsed(cls, value: Budget | str | int | float) -> Budget:
        if isinstance(value, Budget):
            return value
        if isinstance(value, str):
            text = value.strip()
            if floored := _FLOORED.fullmatch(text):
                return replace(cls.parse(floored[1]), floor=int(floored[2]))
            try:
                if text.endswith("%"):
                    return cls(ratio=float(text[:-1]) / 100)
                if is_size(text):
                    return cls(bytes=parse_bytes(text))
                if is_tokens(text):
                    return cls(tokens=parse_tokens(text, "budget"))
                return cls(ratio=float(text)) if "." in text else cls(tokens=int(text))
            except ValueError as error:
                if isinstance(error, PlanError):
                    raise
                raise PlanError(
                    f"budget {short(value)} is neither a share like '20%', a number of entries like 2048 or 2k nor a "
                    "size like '512MiB'"
                ) from None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise PlanError(f"budget must be a Budget, '20%', 0.2, 2048 or '512MiB', got {short(value)}")
        return cls(tokens=value) if isinstance(value, int) else cls(ratio=float(value))

    def entries(self, length: int, minimum: int = 1) -> int:
        """Return the entries to keep for a prompt of `length` tokens without padding, at least `minimum` and the floor.

        If the floor or the number of entries exceeds `length`, nothing is evicted.

        Raises:
            PlanError: the budget is in bytes, and has not been converted to entries.
        """
        if self.bytes is not None:
            raise PlanError(
                f"the budget of {self} is in bytes, and how many entries that are is known on a model only: attach the "
                "plan or call plan.for_model(model), or give a share like '20%' or a number of entries like 2048"
            )
        count = self.tokens if self.tokens is not None else max(int(length * (self.ratio or 0.0)), self.floor)
        return max(count, minimum)

    def with_floor(self, floor: int) -> Budget:
        """Return this share with another floor; other budgets unchanged."""
        return self if self.ratio is None else replace(self, floor=floor)

    def refuse_bytes(self, owner: str, name: str, why: str) -> None:
        """Raise PlanError if parameter `name` of `owner` was given in bytes, which it cannot be because of `why`."""
        if self.bytes is not None:
            raise PlanError(
                f"{owner}: {name} cannot be given in bytes, got {self}: {why}; give a share like '20%' or a number "
                "like 2048"
            )

    def refuse_fewer(self, least: int, owner: str, why: str, name: str = "budget") -> None:
        """Raise PlanError if `owner` was given fewer than the `least` entries it needs for `why`."""
        if self.tokens is not None and self.tokens < least:
            share = f", or write {self.tokens}% for a share" if self.tokens <= _PERCENT else ""
            raise PlanError(
                f"{owner}: a {name} of {self.tokens} entries is too small, at least {least} are needed ({why}); raise "
                f"{name}={share}"
            )

    def __str__(self) -> str:
        if self.bytes is not None:
            return format_bytes(self.bytes)
        if self.tokens is not None:
            return str(self.tokens)
        return f"{100 * (self.ratio or 0.0):g}%" + (f" (at least {self.floor})" if self.floor else "")


def percent_doubt(value: Budget | str | int | float | None) -> str | None:
    """Return a question about a budget written as a small bare number, or None for any other.

    Raises:
        PlanError: the value is no budget.
    """
    tokens = None if value is None else Budget.parse(value).tokens
    if tokens is None or tokens > _PERCENT:
        return None
    return f"budget {tokens} keeps {tokens} entries; for a share write {tokens}%"


def has_floor(value: Any) -> bool:
    """Return whether a value is a budget, or one as text, with a floor."""
    floored = isinstance(value, str) and _FLOORED.fullmatch(value.strip())
    return bool(floored) or (isinstance(value, Budget) and value.floor > 0)


def without_floor(value: Any) -> Any:
    """Return a budget, or one as text, without its floor, and any other value unchanged."""
    return Budget.parse(value).with_floor(0) if has_floor(value) else value
