"""Registry of methods by name, with their parameters, and suggestions for wrong names."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from kvsieve.errors import PlanError, short
from kvsieve.planning import budget as budgets
from kvsieve.planning import loading
from kvsieve.planning.defaults import PAPER
from kvsieve.planning.loading import BUILT_IN, canonical, load_methods
from kvsieve.planning.parameters import check_kinds, inherited_fields
from kvsieve.planning.plans import ROLES, Plan
from kvsieve.planning.roles import budgets_of
from kvsieve.planning.suggestions import check_names, unknown_method

if TYPE_CHECKING:
    from kvsieve.planning.budget import Budget
    from kvsieve.planning.profiles import Fingerprint
    from kvsieve.planning.roles import Role

    Derive = Callable[[Fingerprint, int], Mapping[str, Any]]

# A function that returns a Plan, or the class of a role.
Made = TypeVar("Made", bound=Callable[..., Any])
R = TypeVar("R", bound="Role")


@dataclass(frozen=True)
class MethodInfo:
    """A named method: the maker of its Plan, and its facts for tables.

    phase: when it acts. declared: `query_aware` as declared, None for that of its roles. example: arguments that `make`
    needs at least. derive: returns model-dependent parameters, from the Fingerprint and the tokenizer's digits per
    token, below caller and profile. part: required array of a profile, such as "heads". kind: the registered class,
    None for a function. parent: the method of the base class; `inherited` parameters, which the class does not
    redeclare, are filled in as the parent's are.
    """

    name: str
    title: str
    paper: str
    phase: str
    declared: bool | None
    make: Callable[..., Plan]
    summary: str
    example: Mapping[str, Any] = field(default_factory=dict)
    derive: Derive | None = None
    part: str | None = None
    kind: type[Any] | None = None
    parent: str | None = None
    inherited: frozenset[str] = frozenset()

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameter names and their defaults, including options shared by all evictors, and `profile`."""
        own = {name: parameter.default for name, parameter in inspect.signature(self.make).parameters.items()}
        profile = {"profile": None} if _CALIBRATED.intersection(own) and "profile" not in own else {}
        paper = {"paper": False} if self.part is None and (self.adapts or self.name in PAPER) else {}
        floor = {"floor": budgets.FLOOR} if self.takes_floor else {}
        return {**own, **self.shared_options, **floor, **profile, **paper}

    @property
    def takes_floor(self) -> bool:
        """True for a method with shares, as budgets or besides them."""
        plan = self.make(**self.example)
        return "floor" in inspect.signature(self.make).parameters or any(
            True for role in plan.roles for _ in budgets_of(vars(plan)[role])
        )

    @property
    def adapts(self) -> bool:
        """True if unset parameters are filled in from the model."""
        own = inspect.signature(self.make).parameters
        return bool(self.part is not None or self.derive or "base" in own or _CALIBRATED.intersection(own))

    @property
    def takes_profile(self) -> bool:
        """True for a method that reads a profile directly; others get parameters from one."""
        return "profile" in inspect.signature(self.make).parameters

    @property
    def shared_options(self) -> dict[str, Any]:
        """Options of the plan's evictor and reader that the function for the plan need not list."""
        plan = self.make(**self.example)
        taken = inspect.signature(self.make).parameters
        return {name: value for name, value in shared_options(plan.evict, plan.read).items() if name not in taken}

    def of_parent(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parent's parameters that this method inherits; all of them without a parent."""
        return {name: value for name, value in values.items() if self.parent is None or name in self.inherited}

    @property
    def storage(self) -> str:
        """Storage of entries: "ragged" if KV heads may keep different numbers of them, else "uniform"."""
        evictor = self.make(**self.example).evict
        return "ragged" if evictor is not None and evictor.traits.ragged else "uniform"

    @property
    def query_aware(self) -> bool:
        """True if its choice depends on the end of the prompt."""
        if self.declared is not None:
            return self.declared
        plan = self.make(**self.example)
        return plan.query_aware or plan.read is not None or plan.prefill is not None

    @property
    def roles(self) -> tuple[str, ...]:
        return self.make(**self.example).roles

    @property
    def is_codec(self) -> bool:
        """True for a method that is only a codec, usable as ``codec=`` of others."""
        return self.roles == ("codec",)

    @property
    def is_prefill(self) -> bool:
        """True for a method that is only a sparse prefill, usable as ``prefill=`` of others."""
        return self.roles == ("prefill",)


_METHODS: dict[str, MethodInfo] = {}
# Parameters that calibration finds: a method with one of them also takes `profile`.
_CALIBRATED = frozenset({"tsp_layer", "window", "kernel", "pooling", "tau", "anchor_heads"})

# Fields of evictors and readers that are parameters of every method with one.
_SHARED = ("skip_layers", "every", "answer", "grows", "newest", "sparse_questions", "share")


def shared_options(*parts: Role | None) -> dict[str, Any]:
    """Return the options common to all evictors or readers, with their values in these roles."""
    fields = [(part, {field.name for field in dataclasses.fields(part)}) for part in parts if part is not None]  # type: ignore[arg-type]
    return {name: vars(part)[name] for part, names in fields for name in _SHARED if name in names}


class Parameters(ABC):
    """Dataclass of a method's parameters, for a plan of several roles with many."""

    @abstractmethod
    def plan(self) -> Plan:
        """Return the plan of these parameters."""

    def role(self, kind: type[R], **others: Any) -> R:
        """Return a role with these parameters for the fields of the same names; `others` take precedence."""
        names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        own = {name: value for name, value in vars(self).items() if name in names}
        return kind(**{**own, **others})


class Rarely(TypedDict, total=False):
    """Fields that few methods need; see MethodInfo."""

    example: Mapping[str, Any] | None
    derive: Derive | None
    part: str | None


def register_method(
    name: str,
    *,
    title: str,
    paper: str,
    phase: str,
    query_aware: bool | None = None,
    summary: str = "",
    budget: Budget | str | float | None = None,
    **rarely: Unpack[Rarely],
) -> Callable[[Made], Made]:
    """Register the decorated class or function under `name`: the class of a role, or a function that returns a Plan.

    The fields of a class are the method's parameters, with their defaults. A function, or a class of `Parameters` where
    they are many, is for a plan of several roles, or for other parameters.

    Args:
        name: the method's name; case, hyphens and underscores do not matter.
        title: name in the paper.
        paper: its source, e.g. "arXiv 2404.14469".
        phase: when it acts, e.g. "end of prompt".
        query_aware: its choice depends on the end of the prompt. Default None: if an evictor or propagator does so, or
            for readers and sparse prefill.
        summary: a line for tables. Default: the first line of the docstring.
        budget: default of the parameter `budget` if the class's field has none.
        rarely: `example`, `derive` and `part`; see MethodInfo.

    Raises:
        PlanError: the name is taken, or the class is no dataclass of one role.
    """

    def add(made: Made) -> Made:
        key = canonical(name)
        if not made.__module__.startswith(BUILT_IN):
            loading.PROVIDED["load_methods"]()
        if key in _METHODS:
            raise PlanError(f"a method named {name!r} is registered already, by {_METHODS[key].make.__module__}")
        make: Callable[..., Plan] = _maker(made, budget) if isinstance(made, type) else made
        required = [entry.name for entry in inspect.signature(make).parameters.values() if entry.default is entry.empty]
        missing = [parameter for parameter in required if parameter not in (rarely.get("example") or {})]
        if missing:
            raise PlanError(
                f"the method {name!r} has no default for {missing[0]}: give one"
                + (", as budget= of register_method" if missing[0] == "budget" else "")
                + f", or example={{{missing[0]!r}: ...}}, by which a plan can be made for tables"
            )
        line = summary or (inspect.getdoc(made) or "").partition("\n")[0]
        about = {key: value for key, value in rarely.items() if value is not None}
        lineage = _lineage(made, about) if isinstance(made, type) else {}
        loading.REGISTERED[key] = made.__module__
        _METHODS[key] = MethodInfo(name, title, paper, phase, query_aware, make, line, **about, **lineage)  # type: ignore[arg-type]
        return made

    return add


def _maker(kind: type[Any], budget: Budget | str | float | None) -> Callable[..., Plan]:
    """Return a function from the fields of a role's class, or of Parameters, to the plan."""
    role = next((role for role, base in ROLES.items() if issubclass(kind, base)), None)
    if (role is None and not issubclass(kind, Parameters)) or "__dataclass_fields__" not in vars(kind):
        raise PlanError(
            "register_method takes a function that returns a Plan, or a dataclass that derives from Evictor, "
            f"Propagator, Reader, SparsePrefill or Codec (put @register_method above @dataclass), got {kind.__name__}"
        )
    fixed = {} if budget is None else {"budget": budget}
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    names = [*(name for name in fields if name not in _SHARED), *(name for name in _SHARED if name in fields)]

    def make(**arguments: Any) -> Plan:
        part = kind(**{**fixed, **arguments})
        return part.plan() if role is None else Plan(**{role: part})

    parameters = []
    for name in names:
        default = fields[name].default
        factory = fields[name].default_factory
        value = default if factory is dataclasses.MISSING else factory()
        value = fixed.get(name, inspect.Parameter.empty if value is dataclasses.MISSING else value)
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value))
    make.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    make.__module__, make.__annotations__ = kind.__module__, typing.get_type_hints(kind)
    return make


def method_of(kind: type[Any]) -> MethodInfo | None:
    """Return the method that a class was registered as, or None."""
    return next((info for info in _METHODS.values() if info.kind is kind), None)


def _lineage(kind: type[Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return `kind`, and `parent` and `inherited` of a class without its own model-dependent parameters."""
    says = kind.__module__.startswith(BUILT_IN) or "derive" in about or "part" in about
    for base in () if says else kind.__mro__[1:]:
        info = method_of(base)
        if info is not None and info.adapts and info.part is None:
            same = inherited_fields(kind, base)
            parent, same = (info.name, same) if info.parent is None else (info.parent, same & info.inherited)
            return {"kind": kind, "parent": parent, "inherited": same}
    return {"kind": kind}


def list_methods() -> list[str]:
    """Return the names of all methods, in alphabetical order after "full"."""
    load_methods()
    return sorted((info.name for info in _METHODS.values()), key=lambda name: (name != "full", name))


def method_info(name: str) -> MethodInfo:
    """Return the facts of a method. Raises PlanError with a suggestion for an unknown name."""
    if not isinstance(name, str):
        raise PlanError(f"expected a method's name, such as 'snapkv', got {short(name)}")
    load_methods()
    try:
        return _METHODS[canonical(name)]
    except KeyError:
        raise unknown_method(name, list_methods()) from None


def check_parameters(info: MethodInfo, arguments: Mapping[str, Any]) -> None:
    """Raise PlanError with a suggestion for an unknown parameter, or a wrong kind of value."""
    check_names(info.name, info.parameters, arguments)
    check_kinds(info.name, info.make, arguments)


def check_complete(info: MethodInfo, arguments: Mapping[str, Any]) -> None:
    """Raise PlanError for a missing required parameter."""
    for name, default in info.parameters.items():
        if default is inspect.Parameter.empty and name not in arguments:
            example = ", ".join(f"{parameter}={value!r}" for parameter, value in info.example.items())
            raise PlanError(f"{info.name} needs {name}=, e.g. plan({info.name!r}, {example})")
