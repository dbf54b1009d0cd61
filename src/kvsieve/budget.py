"""Budgets: entries kept per layer and KV head, attention sinks and recent window included."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.errors import PlanError, short
from kvsieve.parameters import MOST


@dataclass(frozen=True)
class Budget:
    """Number of KV entries that a layer keeps per KV head, sinks and recent window included.

    Exactly one of the two is given.

    Attributes:
        tokens: an absolute number of entries, at least 1.
        ratio: a share in (0, 1] of the conversation's true length (padding excluded) once a turn's prompt is complete:
            ``int(length * ratio)`` entries.

    Raises:
        PlanError: neither or both are given, or one is out of range.
    """

    tokens: int | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.ratio is None):
            raise PlanError(
                f"Budget takes exactly one of tokens= and ratio=, got tokens={short(self.tokens)} and "
                f"ratio={short(self.ratio)}"
            )
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

    @classmethod
    def parse(cls, value: Budget | str | int | float) -> Budget:
        """Read a budget as users write it.

        Args:
            value: ``"20%"`` or ``0.2`` (ratio), ``"2048"`` or ``2048`` (tokens), or a Budget.

        Raises:
            PlanError: the value is neither.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, str):
            text = value.strip()
            try:
                if text.endswith("%"):
                    return cls(ratio=float(text[:-1]) / 100)
                return cls(ratio=float(text)) if "." in text else cls(tokens=int(text))
            except ValueError as error:
                if isinstance(error, PlanError):
                    raise
                raise PlanError(
                    f"budget {short(value)} is neither a share like '20%' nor a number of entries like 2048"
                ) from None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise PlanError(f"budget must be a Budget, '20%', 0.2 or 2048, got {short(value)}")
        return cls(tokens=value) if isinstance(value, int) else cls(ratio=float(value))

    def entries(self, length: int, minimum: int = 1) -> int:
        """Entries to keep of a row whose prompt has `length` true tokens, never below `minimum`."""
        asked = self.tokens if self.tokens is not None else int(length * (self.ratio or 0.0))
        return max(asked, minimum)

    def __str__(self) -> str:
        return str(self.tokens) if self.tokens is not None else f"{100 * (self.ratio or 0.0):g}%"
