"""A model's profile: its fields, their validation, and its JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvsieve.errors import PlanError
from kvsieve.folders import write_whole
from kvsieve.planning.profiles.fingerprint import Fingerprint

FORMAT = 1
Heads = tuple[tuple[float, ...], ...]
Filters = tuple[tuple[tuple[float, ...], ...], ...]
# Arrays of a profile, and the levels of their lists.
ARRAYS = {"heads": 2, "q_filters": 3, "q_centres": 3, "head_budgets": 3, "entropies": 2}
HOW_TO_MAKE = "`kvsieve calibrate MODEL --out profile.json`"


@dataclass(frozen=True)
class Profile:
    """Parameters and arrays that calibration found for one model.

    fingerprint: the model. parameters: method -> parameter -> value, defaults of `plan(method, profile=...)`. heads:
    [layers][KV heads] retrieval scores in [0, 1], 0 for a head that retrieves nothing. q_filters: [layers][KV
    heads][D], unit vectors. q_centres: [layers][query heads][2 D], each head's mean query before rotation, then the
    mean length of every channel's rotated pair. head_budgets: [layers][KV heads][99], the share of its entries that a
    head keeps at budgets of 1% to 99%. entropies: [layers][KV heads], truncated matrix entropy of the queries, in
    [0, 1]. All five are None where that part was not calibrated. measured: part -> its raw numbers. text: the prompts.
    environment: the stamp.
    """

    fingerprint: Fingerprint
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    heads: Heads | None = None
    q_filters: Filters | None = None
    q_centres: Filters | None = None
    head_budgets: Filters | None = None
    entropies: Heads | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.fingerprint.name

    def for_method(self, method: str) -> dict[str, Any]:
        """Return the parameters for a method. Raises PlanError if the profile has none."""
        if method not in self.parameters:
            holds = ", ".join(self.parameters) or "none"
            raise PlanError(
                f"the profile of {self.name or 'the model'} holds no parameters for {method} (it does for {holds}); "
                f"leave profile= out, or make one with more parts: {HOW_TO_MAKE}"
            )
        return dict(self.parameters[method])

    def to_dict(self) -> dict[str, Any]:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        parts["fingerprint"] = asdict(self.fingerprint)
        return {"format": FORMAT, **{name: part for name, part in parts.items() if part is not None}}

    @classmethod
    def from_dict(cls, data: Any, where: str = "the profile") -> Profile:
        """Parse the result of `to_dict`. Raises PlanError for anything else; `where` names it."""
        if not isinstance(data, dict) or "format" not in data:
            raise PlanError(f"{where} is not a profile of kvsieve: it has no format; make one with {HOW_TO_MAKE}")
        if data["format"] != FORMAT:
            raise PlanError(
                f"{where} has format {data['format']!r}, this version of kvsieve reads format {FORMAT}; make it anew "
                f"with {HOW_TO_MAKE}"
            )
        try:
            parts = {field.name: data[field.name] for field in fields(cls) if field.name in data}
            parts["fingerprint"] = Fingerprint(**parts["fingerprint"])
            shape = parts["fingerprint"]
            for name in ("parameters", "measured", "text", "environment"):
                if not isinstance(parts.get(name, {}), dict):
                    raise TypeError(f"{name} is not an object")
            if not all(isinstance(settings, dict) for settings in parts.get("parameters", {}).values()):
                raise TypeError("parameters are not objects")
            for name, depth in ARRAYS.items():
                if parts.get(name) is not None:
                    parts[name] = numbers(parts[name], depth)
                    if len(parts[name]) != shape.layers:
                        raise ValueError(f"{name} has {len(parts[name])} layers of {shape.layers}")
        except (KeyError, TypeError, ValueError) as error:
            cause = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise PlanError(f"{where} is damaged ({cause}); make it anew with {HOW_TO_MAKE}") from error
        return cls(**parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, atomically. Raises OSError."""
        write_whole(path, _json(self.to_dict()) + "\n")


def numbers(nested: Any, depth: int) -> Any:
    """Convert nested lists of finite numbers to tuples of floats, `depth` levels deep.

    Raises ValueError or TypeError.
    """
    if depth == 0:
        if isinstance(nested, bool) or not isinstance(nested, (int, float)) or not abs(nested) < float("inf"):
            raise ValueError(f"{nested!r} is not a number")
        return float(nested)
    if isinstance(nested, str) or not isinstance(nested, Sequence):
        raise TypeError(f"{nested!r} is not a list")
    return tuple(numbers(part, depth - 1) for part in nested)


def _json(value: Any, indent: str = "") -> str:
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        lines = [f"{inner}{json.dumps(str(name))}: {_json(part, inner)}" for name, part in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(part, (list, tuple)) for part in value):
        return "[\n" + ",\n".join(inner + _json(part, inner) for part in value) + f"\n{indent}]"
    if isinstance(value, (list, tuple)) and any(isinstance(part, Mapping) for part in value):
        return "[\n" + ",\n".join(inner + json.dumps(part, allow_nan=False) for part in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)
