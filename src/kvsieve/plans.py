"""A plan: at most one object per role. An empty plan is full KV."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvsieve.budget import Budget
from kvsieve.defaults import digits_per_token
from kvsieve.display import brief, html_table
from kvsieve.errors import PlanError, short
from kvsieve.profiles import Fingerprint, Profile, load_profile, profiles_of
from kvsieve.registry import MethodInfo, check_complete, check_parameters, load_methods, method_info, shared_options
from kvsieve.roles import (
    ChunkedEvictor,
    DelegatingEvictor,
    Evictor,
    ProbingEvictor,
    Propagator,
    Reader,
    Role,
    role_class,
    role_name,
)

_ROLES: dict[str, type[Role]] = {"propagate": Propagator, "evict": Evictor, "read": Reader}
_DERIVED = "the model's depth and tokenizer"
_READ: dict[str, Callable[[Any], Any]] = {
    "name": str,
    "profile": lambda value: _record(Fingerprint, value),
    "unset": lambda value: _record(Unset, value),
}
_EXAMPLES = {
    "propagate": "propagate=TSP(rate=0.2)",
    "evict": "evict=SnapKV(budget=0.2)",
    "read": "read=HSA(budget=512)",
}


@dataclass(frozen=True)
class Unset:
    """The named method of a plan and the parameters it was given, while others wait for the model; Plan.for_model."""

    method: str
    given: Mapping[str, Any] = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", {name: _lasting(value) for name, value in self.given.items()})


@dataclass(frozen=True)
class Filled:
    """Parameters that were not given and came with the model. parts: of each source, its name and what came from it."""

    parts: tuple[tuple[str, Mapping[str, Any]], ...]

    @property
    def values(self) -> dict[str, Any]:
        """Parameter -> value; ``base.kernel`` is that of a wrapper's base."""
        return {name: value for _, values in self.parts for name, value in values.items()}

    def __str__(self) -> str:
        told = []
        for source, values in self.parts:
            told.append(", ".join(f"{name}={value}" for name, value in values.items()) + f" from {source}")
        return "; ".join(told)


@dataclass(frozen=True, repr=False)
class Plan:
    """What to do with one model's context.

    propagate: a Propagator, which hidden states go on to deeper layers. evict: an Evictor, which entries stay stored.
    read: a Reader, which entries a new token reads.
    profile: the model whose profile gave the parameters, if one did; `attach` refuses another.
    unset: of a plan made by name, what `attach` needs to fill in the parameters that were not given; until then they
    stand at the paper's defaults. filled: what it filled in. name: what reports call it.

    Raises PlanError for an object that does not fill its role, or a combination that cannot work.
    """

    propagate: Propagator | None = None
    evict: Evictor | None = None
    read: Reader | None = None
    profile: Fingerprint | None = None
    unset: Unset | None = field(default=None, repr=False)
    filled: Filled | None = field(default=None, compare=False, repr=False)
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for role, base in _ROLES.items():
            value = vars(self)[role]
            if isinstance(value, (tuple, list)):
                raise PlanError(f"Plan({role}=...) takes one {base.__name__}, got {len(value)}; choose one of them")
            if value is not None and not isinstance(value, base):
                raise PlanError(
                    f"Plan({role}=...) takes a {base.__name__}, got {short(value)}; e.g. Plan({_EXAMPLES[role]}), or a "
                    f"class of your own that derives from kvsieve.roles.{base.__name__}"
                )
        self._check_together()
        if not self.name:
            parts = [type(getattr(self, role)).__name__ for role in self.roles]
            object.__setattr__(self, "name", "+".join(parts) or "full")

    def _check_together(self) -> None:
        """Raise PlanError for roles that cannot work with each other."""
        propagate, evict = self.propagate, self.evict
        if evict is not None and evict.when.observes and type(evict).observe is Evictor.observe:
            raise PlanError(
                f"{type(evict).__name__} has When(observes=True) and no method observe(ctx) of its own; add one"
            )
        if propagate is not None and evict is not None:
            names = type(evict).__name__, type(propagate).__name__
            if evict.when.chunks:
                raise PlanError(
                    f"{names[0]} acts on every chunk of a prompt, {names[1]} on the whole of it: they cannot be "
                    "combined"
                )
            if isinstance(evict, (ProbingEvictor, ChunkedEvictor)):
                raise PlanError(
                    f"{names[0]} needs passes of its own over the prompt, of which {names[1]} drops tokens: they "
                    "cannot be combined"
                )
            if evict.traits.is_view and propagate.two_pass:
                raise PlanError(
                    f"{names[1]} keeps a short prompt in place of the one given, so {names[0]} could not keep "
                    "everything for later turns: they cannot be combined"
                )
        if self.read is not None and self.shortens_prompt:
            what = evict if isinstance(evict, ChunkedEvictor) else propagate
            raise PlanError(
                f"{type(what).__name__} reads a short prompt again, in full, and is not combined with read=; leave it "
                "None"
            )

    def __repr__(self) -> str:
        return f"<Plan {self.name}{': ' if self.roles else ''}{', '.join(f'{a} {b}' for a, b in self._told())}>"

    def _repr_html_(self) -> str:
        profile = [("profile of", self.profile)] if self.profile is not None else []
        return html_table(f"Plan {self.name}", [*self._told(), *profile])

    def _told(self) -> list[tuple[str, str]]:
        later = [("parameters not given", "with the model")] if self.unset is not None else []
        return [(role, brief(getattr(self, role))) for role in self.roles] + later

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are filled."""
        return tuple(role for role in _ROLES if getattr(self, role) is not None)

    @property
    def acts_once(self) -> bool:
        """True when nothing is dropped before a prompt is complete or while decoding, and one reading is enough."""
        if self.shortens_prompt or self.probes:
            return False
        return self.evict is None or not (self.evict.when.chunks or self.evict.when.steps)

    @property
    def shortens_prompt(self) -> bool:
        """True when the cache holds a shorter prompt in place of the one given, which was read to find it."""
        return (self.propagate is not None and self.propagate.two_pass) or isinstance(self.evict, ChunkedEvictor)

    @property
    def is_view(self) -> bool:
        """True when the evictor drops nothing, and chooses afresh in every turn what its answer reads."""
        return self.evict is not None and self.evict.traits.is_view

    @property
    def probes(self) -> bool:
        """True when the evictor needs passes of its own before a prompt is complete; see roles.ProbingEvictor."""
        return isinstance(self.evict, ProbingEvictor)

    @property
    def window(self) -> int:
        """Queries of the prompt's end that the plan looks at."""
        return max((part.window for part in (self.propagate, self.evict) if part is not None), default=0)

    def queries(self, length: int) -> int:
        """`window` for a prompt of `length` tokens; the last chunk of a chunked prefill holds at least these."""
        return max(self.window, 0 if self.propagate is None else self.propagate.queries(length))

    def caution(self, num_layers: int) -> str | None:
        """What to warn of before the plan runs on a model of `num_layers` layers."""
        return None if self.propagate is None else self.propagate.caution(num_layers)

    @property
    def lacks_tokenizer(self) -> bool:
        """True when the evictor feeds texts of its own whose token ids are not known; see `for_tokenizer`."""
        return self.evict is not None and self.evict.lacks_tokenizer

    def for_tokenizer(self, tokenizer: Any) -> Plan:
        """This plan, with what its evictor leaves to the tokenizer filled in: token ids of texts that it feeds."""
        if self.evict is None or not self.evict.lacks_tokenizer:
            return self
        return dataclasses.replace(self, evict=self.evict.for_tokenizer(tokenizer))

    def for_model(self, model: Any, tokenizer: Any = None) -> Plan:
        """This plan with nothing left open: `attach` does this.

        model: of transformers, or its Fingerprint. tokenizer: the model's; without one its digits are taken to be
        tokens of their own. Parameters of a named method that were not given come, each from the first that has it,
        from the user's own profile of such a model, from a shipped one, from the model's depth and its tokenizer's
        digits, and from the paper. What was given, and a role that was replaced, stays. Raises PlanError for a method
        that needs a profile where there is none, and for a profile whose parameters cannot be used.
        """
        out = self
        if self.unset is not None:
            shape = model if isinstance(model, Fingerprint) else Fingerprint.of(model)
            info, given = method_info(self.unset.method), self.unset.given
            before, after = _named(info, given), _on_model(info, given, shape, digits_per_token(tokenizer))
            mine = [role for role in _ROLES if getattr(self, role) != getattr(before, role)]
            out = dataclasses.replace(after, **{role: getattr(self, role) for role in mine}, name=self.name)
        return out if tokenizer is None else out.for_tokenizer(tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description that `Plan.from_dict` reads back."""
        out: dict[str, Any] = {"name": self.name}
        for role in self.roles:
            out[role] = _plain(getattr(self, role))
        if self.profile is not None:
            out["profile"] = dataclasses.asdict(self.profile)
        if self.unset is not None:
            out["unset"] = dataclasses.asdict(self.unset)
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
            if key in _READ:
                parts[key] = _READ[key](value)
                continue
            if key not in _ROLES:
                raise PlanError(f"cannot read a plan with {key}=: it is none of its roles, {', '.join(_ROLES)}")
            parts[key] = _made(key, value)
        return cls(**parts)


def plan(method: str, **parameters: Any) -> Plan:
    """Make the Plan of a named method: ``plan("fastkv", budget="20%", tsp_layer=14)``.

    Parameters are the method's own (`kvsieve methods` lists them); a budget is a Budget, a share such as "20%" or
    0.2, or a number of entries. Of a method that has `paper` among them, those that are not given come with the model
    when the plan is attached (Plan.for_model); ``paper=True`` takes the paper's defaults, and ``profile=``, a Profile,
    its file or the name of one that is shipped, takes that one's. Raises PlanError, with a suggestion, for an unknown
    method, parameter or bad value, and for a profile that cannot be read or holds nothing for the method.
    """
    info = method_info(method)
    check_parameters(info, parameters)
    given = dict(parameters)
    paper = given.pop("paper", False)
    if not isinstance(paper, bool):
        raise PlanError(f"{info.name}: paper must be True or False, got {paper!r}")
    if paper and given.get("profile") is not None:
        raise PlanError(f"{info.name}: paper=True and profile= are two sources of the same parameters; leave one out")
    made = _named(info, given)
    if info.adapts and not paper and given.pop("profile", None) is None:
        made = dataclasses.replace(made, unset=Unset(info.name, given))
    return made


def _named(info: MethodInfo, given: Mapping[str, Any]) -> Plan:
    """The plan of a method, with the paper's defaults for what was not given and is not in a profile that was."""
    parameters, profile = _profiled(info, given)
    check_complete(info, parameters)
    shared = {name: parameters.pop(name) for name in info.shared_options if name in parameters}
    made = info.make(**parameters)
    changed: dict[str, Any] = {}
    parts: dict[str, Role | None] = {"evict": made.evict, "read": made.read}
    for role, part in parts.items():
        mine = shared.keys() & shared_options(part)
        if part is not None and mine:
            changed[role] = dataclasses.replace(part, **{name: shared[name] for name in mine})  # type: ignore[type-var]
    made = dataclasses.replace(made, **changed)
    return dataclasses.replace(made, name=info.name, profile=profile.fingerprint if profile else made.profile)


def all_parameters(method: str, given: Mapping[str, Any], filled: Filled | None = None) -> dict[str, Any]:
    """Every parameter of `plan(method, **given)`, JSON-ready: given, from its profile, or the paper's default.

    filled: of the plan once it was attached (`sieve.plan.filled`), what came with the model.
    """
    info = method_info(method)
    came = {} if filled is None else filled.values
    values = {**info.parameters, **_profiled(info, given)[0], **came, **given}
    values.pop("paper", None)
    if isinstance(values.get("profile"), Profile):
        values["profile"] = values["profile"].name
    return {name: str(value) if isinstance(value, Budget) else value for name, value in values.items()}


def told(method: str, given: Mapping[str, Any], filled: Filled | None) -> dict[str, Any]:
    """Parameters by which results of a method are told apart: those given, and what came with the model.

    What is as in the paper is left out (so is ``paper=True``): a name alone means the paper's defaults.
    """
    usual = method_info(method).parameters
    named = {name: value for name, value in given.items() if name != "paper"}
    for name, value in (filled.values if filled is not None else {}).items():
        inner = name.removeprefix("base.")
        usually = usual[name] if inner == name else method_info(named.get("base", usual["base"])).parameters[inner]
        if value != usually and not (name == "tsp_rate" and Budget.parse(value) == Budget.parse(usually)):
            named[name] = value
    return named


def _on_model(info: MethodInfo, given: Mapping[str, Any], model: Fingerprint, digits: int) -> Plan:
    """The plan of a method whose parameters are given, or come with a model; see Plan.for_model."""
    derived = dict(info.derive(model, digits)) if info.derive is not None else {}
    measured: dict[str, Any] = {}
    where, profile = _profile_for(info, model)
    if profile is not None and info.part is None:
        measured = profile.for_method(info.name)
    for name in given:
        derived.pop(name, None), measured.pop(name, None)
    derived = {name: value for name, value in derived.items() if name not in measured}
    tokens = Budget.parse(given["budget"]).tokens if given.get("budget") is not None else None
    for values in (derived, measured):
        if tokens is not None and "window" in values:
            # A budget of few entries should not be the window's alone.
            values["window"] = max(1, min(values["window"], tokens // 2))
    parts = []
    try:
        check_parameters(info, measured)
        if profile is not None and info.part is not None:
            measured = {"profile": profile.name}
            made = _named(info, {**given, "profile": profile})
        else:
            made = _named(info, {**derived, **measured, **given})
    except PlanError as error:
        raise PlanError(f"{info.name} with the parameters of {where or _DERIVED}: {error}") from error
    if measured and profile is not None:
        parts.append((where, measured))
        made = dataclasses.replace(made, profile=profile.fingerprint)
    if derived:
        parts.append((_DERIVED, derived))
    base = {**info.parameters, **given}.get("base")
    if isinstance(base, str) and method_info(base).adapts and isinstance(made.evict, DelegatingEvictor):
        own = made.evict.base
        inner = _on_model(method_info(base), {"budget": own.budget}, model, digits)
        assert inner.evict is not None
        ranking: Evictor = dataclasses.replace(inner.evict, **shared_options(own))  # type: ignore[type-var]
        made = dataclasses.replace(made, evict=dataclasses.replace(made.evict, base=ranking), profile=inner.profile)
        found = inner.filled.parts if inner.filled is not None else ()
        parts += [(source, {f"base.{name}": value for name, value in values.items()}) for source, values in found]
    return dataclasses.replace(made, filled=Filled(tuple(parts)) if parts else None)


def _profile_for(info: MethodInfo, model: Fingerprint) -> tuple[str, Profile | None]:
    """The first profile of such a model that holds something for the method, and what to call it.

    Raises PlanError where there is none for a method that needs one.
    """
    for where, profile in profiles_of(model):
        if info.name in profile.parameters if info.part is None else getattr(profile, info.part) is not None:
            return where, profile
    if info.part is not None:
        raise PlanError(
            f"{info.name} needs a profile with {info.part}, and none of this model, {model}, is saved or shipped: "
            f"`kvsieve calibrate MODEL --parts {info.part}` makes one; or give a file as profile="
        )
    return "", None


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


def _record(kind: type[Any], value: Any) -> Any:
    try:
        return kind(**value)
    except (TypeError, AttributeError) as error:
        raise PlanError(f"cannot read a plan with the {kind.__name__.lower()} {short(value)}: {error}") from error


def _lasting(value: Any) -> Any:
    """A parameter as it comes back from JSON, lists as tuples."""
    if isinstance(value, list):
        return tuple(value)
    return str(value) if isinstance(value, Budget) else value


def _plain(value: Any) -> Any:
    """A role, its class under "type", or a field of one, as JSON has it."""
    if isinstance(value, Budget):
        return str(value)
    if dataclasses.is_dataclass(value):
        fields = {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return {"type": role_name(type(value)), **fields}
    return value


def _made(name: str, value: Any) -> Any:
    """The inverse of `_plain`, for the value of field `name`."""
    if not isinstance(value, dict) or ("type" not in value and name not in _ROLES):
        return value
    kind = value.get("type")
    load_methods()
    role = role_class(str(kind))
    if role is None:
        raise PlanError(f"cannot read a plan with {name}={kind!r}: not a role class of this version of kvsieve")
    fields = {each: _made(each, given) for each, given in value.items() if each != "type"}
    try:
        return role(**fields)
    except TypeError as error:
        raise PlanError(f"cannot read a plan with {name}={short(value)}: {error}") from error
