"""A plan: at most one object per role. An empty plan is full KV."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsieve.budget import Budget
from kvsieve.display import brief, html_table
from kvsieve.errors import PlanError, short
from kvsieve.profiles import Fingerprint, Profile, load_profile
from kvsieve.registry import MethodInfo, check_complete, check_parameters, list_methods, method_info
from kvsieve.roles import Asking, Evictor, Looker, Propagator, Reader, Rehearsing, condenses

_ROLES = ("propagate", "evict", "read", "codec")
_EXAMPLES = {
    "propagate": "propagate=TSP(rate=0.2)",
    "evict": "evict=SnapKV(budget=0.2)",
    "read": "read=HSA(budget=512)",
}


@dataclass(frozen=True, repr=False)
class Plan:
    """What to do with one model's context.

    propagate: a Propagator, which hidden states go on to deeper layers. evict: an Evictor, which entries stay stored.
    read: a Reader, which entries a new token reads. codec: how they are encoded; no method has that role yet.
    profile: the model whose profile gave the parameters, if one did; `attach` refuses another.
    name: what reports call it.

    Raises PlanError for an object that does not fill its role, or a combination that cannot work.
    """

    propagate: Propagator | None = None
    evict: Evictor | None = None
    read: Reader | None = None
    codec: None = None
    profile: Fingerprint | None = None
    name: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        for role, protocol in (("propagate", Propagator), ("evict", Evictor), ("read", Reader)):
            value = getattr(self, role)
            if isinstance(value, (tuple, list)):
                raise PlanError(f"Plan({role}=...) takes one {protocol.__name__}, got {len(value)}; choose one of them")
            if value is not None and (isinstance(value, type) or not isinstance(value, protocol)):
                raise PlanError(
                    f"Plan({role}=...) takes a {protocol.__name__}, got {short(value)}; e.g. Plan({_EXAMPLES[role]})"
                )
        if self.propagate is not None and self.evict is not None and self.evict.when.chunks:
            raise PlanError(
                f"{type(self.evict).__name__} acts on every chunk of a prompt, {type(self.propagate).__name__} on the "
                "whole of it: they cannot be combined"
            )
        if self.evict is not None and self.evict.when.looks and not isinstance(self.evict, Looker):
            raise PlanError(f"{type(self.evict).__name__} has When(looks=True) and no method look(ctx); add one")
        if self.propagate is not None and (self.rehearses or condenses(self.evict)):
            raise PlanError(
                f"{type(self.evict).__name__} needs passes of its own over the prompt, of which "
                f"{type(self.propagate).__name__} drops tokens: they cannot be combined"
            )
        for role in ("read", "codec"):
            if getattr(self, role) is not None and self.restarts:
                what = self.evict if condenses(self.evict) else self.propagate
                raise PlanError(
                    f"{type(what).__name__} reads a short prompt again, in full, and is not combined with "
                    f"{role}=; leave it None"
                )
        if self.codec is not None:
            raise PlanError("Plan(codec=...) is not supported by this version of kvsieve: leave it None")
        if self.views and self.restarts:
            raise PlanError(
                f"{type(self.propagate).__name__} keeps a short prompt in place of the one given, so "
                f"{type(self.evict).__name__} could not keep everything for later turns: they cannot be combined"
            )
        if not self.name:
            parts = [type(getattr(self, role)).__name__ for role in self.roles]
            object.__setattr__(self, "name", "+".join(parts) or "full")

    def __repr__(self) -> str:
        return f"<Plan {self.name}{': ' if self.roles else ''}{', '.join(f'{a} {b}' for a, b in self._told())}>"

    def _repr_html_(self) -> str:
        profile = [("profile of", self.profile)] if self.profile is not None else []
        return html_table(f"Plan {self.name}", [*self._told(), *profile])

    def _told(self) -> list[tuple[str, str]]:
        return [(role, brief(getattr(self, role))) for role in self.roles]

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are filled."""
        return tuple(role for role in _ROLES if getattr(self, role) is not None)

    @property
    def acts_once(self) -> bool:
        """True when nothing is dropped before a prompt is complete or while decoding, and one reading is enough."""
        if self.restarts or self.rehearses:
            return False
        return self.evict is None or not (self.evict.when.chunks or self.evict.when.steps)

    @property
    def restarts(self) -> bool:
        """True when the cache holds a shorter prompt in place of the one given, which was read to find it."""
        return bool(getattr(self.propagate, "restarts", False)) or condenses(self.evict)

    @property
    def views(self) -> bool:
        """True when the evictor drops nothing, and chooses afresh in every turn what its answer reads."""
        return bool(getattr(self.evict, "views", False))

    @property
    def rehearses(self) -> bool:
        """True when the evictor needs passes of its own before a prompt is complete; see roles.Rehearsing."""
        return isinstance(self.evict, Rehearsing)

    @property
    def window(self) -> int:
        """Queries of the prompt's end that the plan looks at."""
        return max((part.window for part in (self.propagate, self.evict) if part is not None), default=0)

    def queries(self, length: int) -> int:
        """The same for a prompt of `length` tokens; the last chunk of a chunked prefill holds at least these."""
        asked = getattr(self.propagate, "queries", None)
        return max(self.window, 0 if asked is None else asked(length))

    def caution(self, num_layers: int) -> str | None:
        """What to warn of before the plan runs on a model of `num_layers` layers."""
        said = getattr(self.propagate, "caution", None)
        return None if said is None else said(num_layers)

    @property
    def lacks_tokenizer(self) -> bool:
        """True when the evictor feeds texts of its own whose token ids are not known; see `for_tokenizer`."""
        return isinstance(self.evict, Asking) and self.evict.lacks_tokenizer

    def for_tokenizer(self, tokenizer: Any) -> Plan:
        """This plan, with what its evictor leaves to the tokenizer filled in: token ids of texts that it feeds."""
        if not isinstance(self.evict, Asking) or not self.evict.lacks_tokenizer:
            return self
        return dataclasses.replace(self, evict=self.evict.for_tokenizer(tokenizer))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description that `Plan.from_dict` reads back."""
        out: dict[str, Any] = {"name": self.name}
        for role in self.roles:
            out[role] = _plain(getattr(self, role))
        if self.profile is not None:
            out["profile"] = dataclasses.asdict(self.profile)
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The inverse of `to_dict`, for role classes of kvsieve.methods and of files that registered a method.

        Raises PlanError for others.
        """
        if not isinstance(data, dict):
            raise PlanError(f"a plan is read from what Plan.to_dict() made, a dict, got {short(data)}")
        parts: dict[str, Any] = {}
        for key, value in data.items():
            if key in ("name", "profile"):
                parts[key] = str(value) if key == "name" else _fingerprint(value)
                continue
            if key not in _ROLES:
                raise PlanError(f"cannot read a plan with {key}=: it is none of its roles, {', '.join(_ROLES)}")
            parts[key] = _made(key, value)
        return cls(**parts)


def plan(method: str, **parameters: Any) -> Plan:
    """Make the Plan of a named method: ``plan("fastkv", budget="20%", tsp_layer=14)``.

    Parameters are the method's own (`kvsieve methods` lists them); a budget is a Budget, a share such as "20%" or
    0.2, or a number of entries. ``profile=``, where the method takes it, is a Profile, its file or the name of one that
    is shipped: it gives the parameters that were not given here. Raises PlanError, with a suggestion, for an unknown
    method, parameter or bad value, and for a profile that cannot be read or holds nothing for the method.
    """
    info = method_info(method)
    check_parameters(info, parameters)
    parameters, profile = _profiled(info, parameters)
    check_complete(info, parameters)
    shared = {name: parameters.pop(name) for name in info.shared_options if name in parameters}
    made = info.make(**parameters)
    for role in ("evict", "read"):
        part = getattr(made, role)
        mine = {name: value for name, value in shared.items() if hasattr(part, name)}
        if mine:
            made = dataclasses.replace(made, **{role: dataclasses.replace(part, **mine)})
    return dataclasses.replace(made, name=info.name, profile=profile.fingerprint if profile else made.profile)


def all_parameters(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter that `plan(method, **given)` uses: given, from the profile, or the default. JSON-ready."""
    info = method_info(method)
    values = {**info.parameters, **_profiled(info, given)[0], **given}
    if isinstance(values.get("profile"), Profile):
        values["profile"] = values["profile"].name
    return {name: str(value) if isinstance(value, Budget) else value for name, value in values.items()}


def _profiled(info: MethodInfo, given: Mapping[str, Any]) -> tuple[dict[str, Any], Profile | None]:
    """What to call the method with, a profile's parameters among it, and the profile."""
    parameters = dict(given)
    source = parameters.pop("profile", None)
    if source is None:
        return parameters, None
    profile = load_profile(source)
    if info.takes_profile:
        return {**parameters, "profile": profile}, profile
    found = profile.for_method(info.name)
    check_parameters(info, found)
    return {**found, **parameters}, profile


def _fingerprint(value: Any) -> Fingerprint:
    try:
        return Fingerprint(**value)
    except TypeError as error:
        raise PlanError(f"cannot read a plan whose profile is {short(value)}: {error}") from error


def _plain(value: Any) -> Any:
    """A role, its class under "type", or a field of one, as JSON has it."""
    if isinstance(value, Budget):
        return str(value)
    if dataclasses.is_dataclass(value):
        fields = {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return {"type": _type_name(type(value)), **fields}
    return value


def _type_name(kind: type) -> str:
    """How a role's class is written: by its name where it is one of kvsieve.methods, else "module:name"."""
    # Imported here because every method's file imports this one.
    from kvsieve import methods

    ours = getattr(methods, kind.__name__, None) is kind
    return kind.__name__ if ours else f"{kind.__module__}:{kind.__name__}"


def _role_class(name: str) -> type | None:
    """The inverse; only for classes that stand in a module which registered a method, as a file may name anything."""
    from kvsieve import methods

    module, colon, kind = name.rpartition(":")
    if not colon:
        found = getattr(methods, kind, None)
    elif module in {method_info(each).make.__module__ for each in list_methods()}:
        found = vars(sys.modules[module]).get(kind)
        found = found if getattr(found, "__module__", None) == module else None
    else:
        found = None
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def _made(name: str, value: Any) -> Any:
    """The inverse of `_plain`, for the value of field `name`."""
    if not isinstance(value, dict) or ("type" not in value and name not in _ROLES):
        return value
    kind = value.get("type")
    role = _role_class(str(kind))
    if role is None:
        raise PlanError(f"cannot read a plan with {name}={kind!r}: not a role class of this version of kvsieve")
    fields = {each: _made(each, given) for each, given in value.items() if each != "type"}
    try:
        return role(**fields)
    except TypeError as error:
        raise PlanError(f"cannot read a plan with {name}={short(value)}: {error}") from error
