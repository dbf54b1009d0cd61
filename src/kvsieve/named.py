"""Plans by name: a method's parameters as given, from a profile, from the model, or as in the paper."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsieve.budget import Budget
from kvsieve.defaults import digits_per_token
from kvsieve.errors import PlanError, short
from kvsieve.loading import provides
from kvsieve.plans import ROLES, Plan, SettledParameters, Unset
from kvsieve.profiles import Fingerprint, Profile, load_profile, profiles_of
from kvsieve.registry import (
    MethodInfo,
    check_complete,
    check_parameters,
    list_methods,
    method_info,
    shared_options,
)
from kvsieve.roles import Codec, DelegatingEvictor, Evictor, Role, SparsePrefill
from kvsieve.specs import split_specs

# Codec of "2bit" and the like.
_REST = "rotated"
_BITS = re.compile(r"(\d+)[ -]?bits?")
_DERIVED = "the model's depth and tokenizer"


def plan(
    method: str,
    *,
    codec: Codec | str | None = None,
    rest: Codec | str | None = None,
    prefill: SparsePrefill | str | None = None,
    **parameters: Any,
) -> Plan:
    """Make the Plan of a named method: ``plan("fastkv", budget="20%", tsp_layer=14)``.

    Parameters are the method's own (`kvsieve methods` lists them); a budget is a Budget, a share such as "20%" or
    0.2, a number of entries, or the size of the whole cache of one prompt, such as "512MiB". Of any method, `codec`
    says how entries are stored: a Codec, or one as text, ``codec="kivi:bits=4"``. Of one that evicts, `rest` says how
    entries that it would drop are stored instead: a codec again, or "2bit", "3bit" or "4bit". Of any method, `prefill`
    says what the queries of prompts attend to: a SparsePrefill, or one as text, ``prefill="xattention:threshold=0.9"``.
    Of a method that has `paper` among them, those that are not given come with the model when the plan is attached
    (Plan.for_model); ``paper=True`` takes the paper's defaults, ``profile=``, a Profile, its file or the name of one
    that is shipped, takes that one's. Raises PlanError, with a suggestion, for an unknown method, parameter or bad
    value, and for a profile that cannot be read or holds nothing for the method.
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
    if codec is not None:
        if made.codec is not None:
            raise PlanError(f"{info.name} is a codec itself, got codec={short(codec)} as well; leave one of them out")
        made = dataclasses.replace(made, codec=codec_of(codec))
    if rest is not None:
        if made.rest is not None:
            raise PlanError(f"{info.name} keeps the rest itself, got rest={short(rest)} as well; leave it out")
        made = dataclasses.replace(made, rest=rest_of(rest))
    if prefill is not None:
        if made.prefill is not None:
            raise PlanError(
                f"{info.name} reads prompts sparsely itself, got prefill={short(prefill)} as well; leave one out"
            )
        made = dataclasses.replace(made, prefill=prefill_of(prefill))
    return made


def crossed(
    methods: Iterable[tuple[str, Mapping[str, Any]]],
    codecs: Sequence[str | None],
    rests: Sequence[str | None],
    prefills: Sequence[str | None] = (None,),
) -> list[tuple[str, dict[str, Any]]]:
    """Cross methods with codecs, rests and prefills.

    A codec itself runs under no other, what drops nothing has no rest, what reads prompts sparsely has no prefill.

    Args:
        methods: names, and parameters that were given.
        codecs: as text, None for none.
        rests: likewise, of what evictors would drop.
        prefills: likewise, what reads prompts sparsely.

    Raises:
        PlanError: there are rests, and no method has one to keep.
    """
    out, kept = [], False
    for name, given in methods:
        info = method_info(name)
        example = info.make(**info.example)
        drops = example.evict is not None and example.rest is None and not example.evict.traits.is_view
        kept = kept or drops
        for codec in (None,) if info.is_codec else codecs:
            for rest in rests if drops else (None,):
                for prefill in (None,) if example.prefill is not None else prefills:
                    parts = {"codec": codec, "rest": rest, "prefill": prefill}
                    out.append((name, {**given, **{role: each for role, each in parts.items() if each is not None}}))
    if any(rests) and out and not kept:
        raise PlanError(
            f"rest={next(filter(None, rests))} keeps what an evictor would drop, and none of the methods named has "
            "such a rest; name one that evicts, such as snapkv"
        )
    return out


def rest_of(value: Codec | str) -> Codec:
    """Return a codec of what is otherwise dropped. Raises PlanError."""
    if isinstance(value, str):
        bits = _BITS.fullmatch(value.strip())
        return codec_of(f"{_REST}:bits={bits[1]}" if bits else value)
    if isinstance(value, Codec):
        return value
    raise PlanError(f"rest= takes '2bit', '3bit', '4bit', a Codec or its name, got {short(value)}")


def codec_of(value: Codec | str) -> Codec:
    """Return a codec that is one, or is written as ``kivi:bits=4``. Raises PlanError."""
    made = value if isinstance(value, Codec) else _alone("codec", value, "kivi:bits=4").codec
    assert made is not None
    return made


def prefill_of(value: SparsePrefill | str) -> SparsePrefill:
    """Return a SparsePrefill that is one, or is written as ``xattention:threshold=0.9``. Raises PlanError."""
    made = value if isinstance(value, SparsePrefill) else _alone("prefill", value, "xattention:threshold=0.9").prefill
    assert made is not None
    return made


def _alone(role: str, value: Any, example: str) -> Plan:
    """Return the plan of a method, as it is written, that has this one role. Raises PlanError."""
    if not isinstance(value, str):
        raise PlanError(f"{role}= takes a {ROLES[role].__name__}, or its name such as {example!r}, got {short(value)}")
    specs = split_specs(value)
    if len(specs) != 1:
        raise PlanError(f"{role}= takes one {role}, got {value!r}")
    ((name, given),) = specs
    info = method_info(name)
    if info.roles != (role,):
        known = [each for each in list_methods() if method_info(each).roles == (role,)]
        raise PlanError(f"{info.name} is no {role}; {role}s are {', '.join(known)}")
    check_parameters(info, given)
    return info.make(**given)


@provides("settle")
def _settle(plan: Plan, unset: Unset, model: Any, tokenizer: Any) -> Plan:
    """Return a plan made by name with what comes with the model; see Plan.for_model."""
    shape = model if isinstance(model, Fingerprint) else Fingerprint.of(model)
    info, given = method_info(unset.method), unset.given
    before, after = _named(info, given), _on_model(info, given, shape, digits_per_token(tokenizer))
    mine = {role: vars(plan)[role] for role in ROLES if vars(plan)[role] != vars(before)[role]}
    parts = [part for each in (plan, after) if each.filled is not None for part in each.filled.parts]
    filled = SettledParameters(tuple(parts)) if parts else None
    return dataclasses.replace(after, **mine, name=plan.name, filled=filled)


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


def all_parameters(method: str, given: Mapping[str, Any], filled: SettledParameters | None = None) -> dict[str, Any]:
    """Every parameter of `plan(method, **given)`, JSON-ready: given, from its profile, or the paper's default.

    filled: of the plan once it was attached (`sieve.plan.filled`), what came with the model.
    """
    info = method_info(method)
    came = {} if filled is None else filled.values
    values = {**info.parameters, **_profiled(info, given)[0], **came, **given}
    values.pop("paper", None)
    if isinstance(values.get("profile"), Profile):
        values["profile"] = values["profile"].name
    written = (Budget, Codec, SparsePrefill)
    return {name: str(value) if isinstance(value, written) else value for name, value in values.items()}


def told(method: str, given: Mapping[str, Any], filled: SettledParameters | None) -> dict[str, Any]:
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
    return dataclasses.replace(made, filled=SettledParameters(tuple(parts)) if parts else None)


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
    """Parameters to call the method with, a profile's among them, and the profile."""
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
