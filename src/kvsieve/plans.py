"""A plan: at most one object per role. An empty plan is full KV."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvsieve.budget import Budget
from kvsieve.errors import PlanError
from kvsieve.registry import check_parameters, method_info
from kvsieve.roles import Evictor, Looker, Propagator

_ROLES = ("propagate", "evict", "read", "codec")


@dataclass(frozen=True)
class Plan:
    """What to do with one model's context.

    propagate: a Propagator, which hidden states go on to deeper layers. evict: an Evictor, which entries stay stored.
    read, codec: which entries a query reads, and how they are encoded; no method of this version has these roles.
    name: what reports call it.

    Raises PlanError for an object that does not fill its role, or a combination that cannot work.
    """

    propagate: Propagator | None = None
    evict: Evictor | None = None
    read: None = None
    codec: None = None
    name: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        for role, protocol in (("propagate", Propagator), ("evict", Evictor)):
            value = getattr(self, role)
            if isinstance(value, (tuple, list)):
                raise PlanError(f"Plan({role}=...) takes one {protocol.__name__}, got {len(value)}: a role is filled once")
            if value is not None and (isinstance(value, type) or not isinstance(value, protocol)):
                raise PlanError(
                    f"Plan({role}=...) takes a {protocol.__name__}, got {value!r}; "
                    f"e.g. Plan({'propagate=TSP(rate=0.2)' if role == 'propagate' else 'evict=SnapKV(budget=0.2)'})"
                )
        if self.propagate is not None and self.evict is not None and self.evict.when.chunks:
            raise PlanError(
                f"{type(self.evict).__name__} acts on every chunk of a prompt, {type(self.propagate).__name__} on the "
                "whole of it: they cannot be combined"
            )
        if self.evict is not None and self.evict.when.looks and not isinstance(self.evict, Looker):
            raise PlanError(f"{type(self.evict).__name__} has When(looks=True) and no method look(ctx); add one")
        for role in ("read", "codec"):
            if getattr(self, role) is not None and self.restarts:
                raise PlanError(
                    f"{type(self.propagate).__name__} reads a shorter prompt again, which a {role}= could not tell from "
                    f"the whole one: they cannot be combined; leave {role}= None"
                )
            if getattr(self, role) is not None:
                raise PlanError(f"Plan({role}=...) is not supported by this version of kvsieve: leave it None")
        if not self.name:
            parts = [type(getattr(self, role)).__name__ for role in self.roles]
            object.__setattr__(self, "name", "+".join(parts) or "full")

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are filled."""
        return tuple(role for role in _ROLES if getattr(self, role) is not None)

    @property
    def acts_once(self) -> bool:
        """True when nothing is dropped before a prompt is complete or while decoding."""
        return self.evict is None or not (self.evict.when.chunks or self.evict.when.steps)

    @property
    def window(self) -> int:
        """Queries of the prompt's end that the plan looks at."""
        return max((part.window for part in (self.propagate, self.evict) if part is not None), default=0)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description that `Plan.from_dict` reads back."""
        out: dict[str, Any] = {"name": self.name}
        for role in self.roles:
            out[role] = _plain(getattr(self, role))
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`, for the role classes of kvsieve.methods. Raises PlanError for unknown types."""
        parts: dict[str, Any] = {}
        for key, value in data.items():
            if key == "name":
                parts[key] = value
                continue
            if key not in _ROLES:
                raise PlanError(f"cannot read a plan with {key}=: it is none of its roles, {', '.join(_ROLES)}")
            parts[key] = _made(key, value)
        return cls(**parts)


def plan(method: str, **parameters: Any) -> Plan:
    """Make the Plan of a named method: ``plan("fastkv", budget="20%", tsp_layer=14)``.

    Parameters are the method's own (`kvsieve methods` lists them); a budget is a Budget, a share such as "20%" or
    0.2, or a number of entries. Raises PlanError, with a suggestion, for an unknown method, parameter or bad value.
    """
    info = method_info(method)
    check_parameters(info, parameters)
    shared = {name: parameters.pop(name) for name in info.shared_options if name in parameters}
    made = info.make(**parameters)
    if shared:
        made = dataclasses.replace(made, evict=dataclasses.replace(made.evict, **shared))  # type: ignore[type-var]
    return dataclasses.replace(made, name=info.name)


def _plain(value: Any) -> Any:
    """A role, its class under "type", or a field of one, as JSON has it."""
    if isinstance(value, Budget):
        return str(value)
    if dataclasses.is_dataclass(value):
        fields = {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return value


def _made(name: str, value: Any) -> Any:
    """The inverse of `_plain`, for the value of field `name`."""
    # Imported here because every method's file imports this one.
    from kvsieve import methods

    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    role = getattr(methods, str(kind), None)
    if not isinstance(role, type):
        raise PlanError(f"cannot read a plan with {name}={kind!r}: not a role class of this version of kvsieve")
    return role(**{each: _made(each, given) for each, given in value.items() if each != "type"})
