"""Parameters of named methods: given, from a profile, from the model, or from the paper."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from kvsieve.errors import PlanError
from kvsieve.planning.budget import Budget
from kvsieve.planning.defaults import PAPER, digits_per_token, paper_model, pooling, published
from kvsieve.planning.loading import PROVIDED, REGISTERED, canonical
from kvsieve.planning.parameters import inherited_fields
from kvsieve.planning.plans import ROLES, Plan
from kvsieve.planning.profiles import Fingerprint, Profile, load_profile, profiles_of
from kvsieve.planning.registry import (
    MethodInfo,
    check_complete,
    check_parameters,
    method_info,
    method_of,
    shared_options,
)
from kvsieve.planning.roles import Codec, Evictor, Role, SparsePrefill, base_of, role_class, with_floor
from kvsieve.planning.unset import SettledParameters

_DERIVED = "the model's depth and tokenizer"
# Parameters that calibration finds for all methods which pool a window's attention.
_POOLING = frozenset({"window", "kernel", "pooling"})


def settled(plan: Plan, model: Any, tokenizer: Any) -> Plan:
    """Return a plan with the parameters that come with the model, if it was made by name; see Plan.for_model."""
    unset = plan.unset
    if unset is None:
        return plan
    shape = model if isinstance(model, Fingerprint) else Fingerprint.of(model)
    info = method_info(unset.method)
    arguments = {name: value for name, value in unset.given.items() if name != "merge"}
    rule = unset.given.get("merge")
    before = with_merge(plan_of(info, arguments), rule)
    after = with_merge(_on_model(info, arguments, shape, digits_per_token(tokenizer)), rule)
    changes = {role: vars(plan)[role] for role in ROLES if vars(plan)[role] != vars(before)[role]}
    parts = [part for source in (plan, after) if source.filled is not None for part in source.filled.parts]
    filled = SettledParameters(tuple(parts)) if parts else None
    return dataclasses.replace(after, **changes, name=plan.name, filled=filled)


def plan_of(info: MethodInfo, arguments: Mapping[str, Any]) -> Plan:
    """Return the plan of a method with its own defaults for parameters neither given nor in a given profile."""
    parameters, profile = profiled(info, arguments)
    check_complete(info, parameters)
    shared = {name: parameters.pop(name) for name in info.shared_options if name in parameters}
    floor = parameters.get("floor")
    if "floor" not in inspect.signature(info.make).parameters:
        parameters.pop("floor", None)
    if "window" not in arguments and _fits_window(info):
        parameters = _with_small_window({"window": info.parameters["window"], **parameters}, parameters.get("budget"))
    with named_as(info.name):
        plan = info.make(**parameters)
    changed: dict[str, Any] = {}
    parts: dict[str, Role | None] = {"evict": plan.evict, "read": plan.read}
    for role, part in parts.items():
        names = shared.keys() & shared_options(part)
        if part is not None and names:
            changed[role] = dataclasses.replace(part, **{name: shared[name] for name in names})  # type: ignore[type-var]
    plan = dataclasses.replace(plan, **changed)
    if floor is not None:
        plan = dataclasses.replace(plan, **{role: with_floor(vars(plan)[role], floor) for role in plan.roles})
    return dataclasses.replace(plan, name=info.name, profile=profile.fingerprint if profile else plan.profile)


def _fits_window(info: MethodInfo) -> bool:
    """Return True if the window of a method comes with the model, unless it is given."""
    origin = info if info.parent is None else method_info(info.parent)
    return origin.derive is not None and "window" in info.of_parent({"window": 0}) and "window" in info.parameters


def _with_small_window(values: Mapping[str, Any], budget: Any) -> dict[str, Any]:
    """Return parameters with a window that leaves half of a budget in tokens; unchanged without one."""
    tokens = None if budget is None else Budget.parse(budget).tokens
    if tokens is None or "window" not in values:
        return dict(values)
    return {**values, "window": max(1, min(values["window"], tokens // 2))}


@contextlib.contextmanager
def named_as(name: str) -> Iterator[None]:
    """Let a PlanError that begins with the name of another role's class begin with that of a method."""
    try:
        yield
    except PlanError as error:
        owner, _, rest = str(error).partition(": ")
        known = canonical(name)
        if not rest or role_class(owner) is None or canonical(owner) == known or known not in REGISTERED:
            raise
        raise PlanError(f"{name}: {rest}") from error


def with_merge(plan: Plan, rule: str | None) -> Plan:
    """Return a plan that merges the entries its evictor drops, by a rule as text; unchanged for None."""
    if rule is None:
        return plan
    return dataclasses.replace(plan, evict=PROVIDED["merge"](plan.name, plan.evict, rule))


def settled_role(role: Role, model: Any, tokenizer: Any = None) -> Plan:
    """Return the plan of a role object, with fields at their default filled in as those of a named plan.

    Its class is a registered one or derives from one; fields that it redeclares keep their own defaults. A role object
    in a Plan, in contrast, is used unchanged.
    """
    (place,) = (name for name, base in ROLES.items() if name != "rest" and isinstance(role, base))
    roles: dict[str, Any] = {place: role}
    plan = Plan(**roles)
    kind = next((base for base in type(role).__mro__ if method_of(base) is not None), None)
    info = None if kind is None else method_of(kind)
    if kind is None or info is None or not info.adapts or info.part is not None:
        return plan
    own = vars(role)
    usual = {field.name: field.default for field in dataclasses.fields(kind)}
    arguments = {name: own[name] for name in info.parameters if name in usual and own[name] != usual[name]}
    came = _on_model(info, arguments, Fingerprint.of(model), digits_per_token(tokenizer))
    inherited = inherited_fields(type(role), kind)
    parts = [(where, {name: value for name, value in values.items() if name in inherited})
             for where, values in (came.filled.parts if came.filled is not None else ())]  # fmt: skip
    filled = SettledParameters(tuple(part for part in parts if part[1]))
    roles[place] = dataclasses.replace(role, **filled.values)  # type: ignore[type-var]
    return dataclasses.replace(plan, **roles, filled=filled if filled.parts else None)


def all_parameters(
    method: str, arguments: Mapping[str, Any], filled: SettledParameters | None = None
) -> dict[str, Any]:
    """Return every parameter of `plan(method, **arguments)`, JSON-ready: given, from its profile, or its default.

    filled: parameters filled in by attaching (`sieve.plan.filled`).
    """
    info = method_info(method)
    came = {} if filled is None else filled.values
    paper = arguments.get("paper", False)
    values = {
        **info.parameters,
        **(as_in_paper(info, arguments) if paper else {}),
        **profiled(info, arguments)[0],
        **came,
    }
    values.update(arguments)
    values.pop("paper", None)
    if "floor" in values and paper:
        values["floor"] = arguments.get("floor", 0)
    if isinstance(values.get("profile"), Profile):
        values["profile"] = values["profile"].name
    written = (Budget, Codec, SparsePrefill)
    return {name: str(value) if isinstance(value, written) else value for name, value in values.items()}


def label_parameters(method: str, arguments: Mapping[str, Any], filled: SettledParameters | None) -> dict[str, Any]:
    """Return the parameters that label a method's results: the given ones, and those from the model.

    Values equal to the method's default are omitted, as are ``paper=True`` and ``floor=0``: they are implied by the
    name.
    """
    info = method_info(method)
    paper = as_in_paper(info, arguments) if arguments.get("paper") else {}
    named = {name: value for name, value in arguments.items() if name not in {"paper", *paper}}
    if named.get("floor") == 0:
        del named["floor"]
    for name, value in {**paper, **(filled.values if filled is not None else {})}.items():
        inner = name.removeprefix("base.")
        owner = info if inner == name else method_info(arguments.get("base", info.parameters["base"]))
        usually = owner.parameters[inner]
        if value != usually and not (name == "tsp_rate" and Budget.parse(value) == Budget.parse(usually)):
            named[name] = value
    return named


def as_in_paper(info: MethodInfo, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of ``paper=True``, or those given instead; ``base.kernel`` is that of a wrapper's base."""
    own = {name: arguments.get(name, value) for name, value in _paper(info).items()}
    base = {**info.parameters, **arguments}.get("base")
    inner = _paper(method_info(base)) if isinstance(base, str) else {}
    return {**own, **{f"base.{name}": value for name, value in inner.items() if name not in info.parameters}}


def _paper(info: MethodInfo) -> dict[str, Any]:
    """Return a method's paper's parameters, or those of its base class's method."""
    return info.of_parent(PAPER.get(info.parent or info.name, {}))


def _on_model(info: MethodInfo, arguments: Mapping[str, Any], model: Fingerprint, digits: int) -> Plan:
    """Return the plan of a method with parameters given or filled in from a model; see Plan.for_model."""
    origin = info if info.parent is None else method_info(info.parent)
    derived = info.of_parent(origin.derive(model, digits)) if origin.derive is not None else {}
    paper = info.of_parent(published(origin.name, model)) if origin.derive is not None else {}
    measured: dict[str, Any] = {}
    where, profile = _profile_for(info, model)
    if profile is not None and info.part is None:
        measured = held_parameters(info, profile) or {}
    paper = {name: value for name, value in paper.items() if name not in measured and name not in arguments}
    measured = {name: value for name, value in measured.items() if name not in arguments}
    derived = {name: value for name, value in derived.items() if not {name} & {*arguments, *measured, *paper}}
    derived, paper, measured = (
        _with_small_window(values, arguments.get("budget")) for values in (derived, paper, measured)
    )
    parts = []
    try:
        check_parameters(info, measured)
        if profile is not None and info.part is not None:
            measured = {"profile": profile.name}
            plan = plan_of(info, {**arguments, "profile": profile})
        else:
            plan = plan_of(info, {**derived, **paper, **measured, **arguments})
    except PlanError as error:
        raise PlanError(f"{info.name} with the parameters of {where or _DERIVED}: {error}") from error
    if measured and profile is not None:
        parts.append((where, measured))
        plan = dataclasses.replace(plan, profile=profile.fingerprint)
    if paper:
        parts.append((f"its paper, for a model of {paper_model(model)}'s shape", paper))
    if derived:
        parts.append((_DERIVED, derived))
    base = {**info.parameters, **arguments}.get("base")
    own = base_of(plan.evict)
    if isinstance(base, str) and method_info(base).adapts and plan.evict is not None and own is not None:
        inner = _on_model(method_info(base), {"budget": own.budget}, model, digits)
        assert inner.evict is not None
        ranking: Evictor = dataclasses.replace(inner.evict, **shared_options(own))  # type: ignore[type-var]
        evict: Evictor = dataclasses.replace(plan.evict, base=ranking)  # type: ignore[type-var]
        plan = dataclasses.replace(plan, evict=evict, profile=inner.profile)
        found = inner.filled.parts if inner.filled is not None else ()
        parts += [(source, {f"base.{name}": value for name, value in values.items()}) for source, values in found]
    return dataclasses.replace(plan, filled=SettledParameters(tuple(parts)) if parts else None)


def _profile_for(info: MethodInfo, model: Fingerprint) -> tuple[str, Profile | None]:
    """Return the first profile of such a model that has parameters for the method, and its name.

    Raises PlanError if a method needs one and there is none.
    """
    for where, profile in profiles_of(model):
        if held_parameters(info, profile) is not None if info.part is None else getattr(profile, info.part) is not None:
            return where, profile
    if info.part is not None:
        raise PlanError(
            f"{info.name} needs a profile with {info.part}, and none of this model, {model}, is saved or shipped: "
            f"`kvsieve calibrate MODEL --parts {info.part}` makes one; or give a file as profile="
        )
    return "", None


def held_parameters(info: MethodInfo, profile: Profile) -> dict[str, Any] | None:
    """Return a profile's parameters for a method, else for its base class's method, else its pooling, else None."""
    if info.name in profile.parameters:
        return dict(profile.parameters[info.name])
    if info.parent is not None:
        found = held_parameters(method_info(info.parent), profile)
        return None if found is None else info.of_parent(found)
    # Methods that are newer than the profile; calibration gives them SnapKV's.
    pooled = profile.parameters.get("snapkv", {})
    takes = info.derive is pooling and info.parameters.keys() & pooled.keys() >= _POOLING
    return {name: pooled[name] for name in pooled.keys() & _POOLING} if takes else None


def profiled(info: MethodInfo, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Profile | None]:
    """Return the parameters of a call, including a profile's, and the profile."""
    parameters = dict(arguments)
    source = parameters.pop("profile", None)
    if source is None:
        return parameters, None
    profile = load_profile(source)
    if info.takes_profile:
        return {**parameters, "profile": profile}, profile
    own = held_parameters(info, profile)
    found = profile.for_method(info.name) if own is None else own
    check_parameters(info, found)
    return {**found, **parameters}, profile
