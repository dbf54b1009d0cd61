"""Plans by name, with parameters from the caller, a profile, the model, or the paper."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvsieve.errors import PlanError, short
from kvsieve.planning import budget as budgets
from kvsieve.planning.budget import Budget, has_floor, without_floor
from kvsieve.planning.plans import ROLES, Plan
from kvsieve.planning.registry import MethodInfo, check_parameters, list_methods, method_info
from kvsieve.planning.roles import Codec, Evictor, SparsePrefill, base_of, budgets_of
from kvsieve.planning.settled import as_in_paper, plan_of, with_merge
from kvsieve.planning.specs import split_specs
from kvsieve.planning.suggestions import role_error
from kvsieve.planning.unset import Unset

# Codec of "2bit" and the like.
_REST = "rotated"
_BITS = re.compile(r"(\d+)[ -]?bits?")


def plan(
    method: str,
    *,
    codec: Codec | str | None = None,
    rest: Codec | str | None = None,
    prefill: SparsePrefill | str | None = None,
    merge: str | None = None,
    **parameters: Any,
) -> Plan:
    """Make the Plan of a named method: ``plan("fastkv", budget="20%", tsp_layer=14)``, ``plan("fastkv:budget=20%")``.

    Parameters are the method's own (`kvsieve methods` lists them), and these:

    - budget: a Budget, a share such as "20%" or 0.2, a number of entries, or the size of one prompt's whole cache, such
      as "512MiB".
    - floor: least entries of a share (default 512, so that short prompts are not evicted from; 0 for none;
      ``paper=True`` has none).
    - codec: quantizes stored entries: a Codec, or one as text, ``codec="kivi:bits=4"``.
    - rest: quantizes entries that the method would evict, instead of dropping them: a codec, or "2bit", "3bit" or
      "4bit".
    - prefill: sparse attention of prompts: a SparsePrefill, or one as text, ``prefill="xattention:threshold=0.9"``.
    - merge: merges entries that the method would drop into those that it keeps: "mean", "d2o", "kvmerger", "zeromerge"
      or "cam", with parameters as in ``merge="mean:weights=true"``.
    - paper: True for the paper's parameters (kvsieve.planning.defaults.PAPER). Otherwise parameters that are not given
      are filled in when the plan is attached (Plan.for_model).
    - profile: a Profile, its file or the name of a shipped one, with parameters.

    Raises PlanError, with a suggestion, for an unknown method, parameter or bad value, and for a profile that cannot be
    read or has nothing for the method.
    """
    options = {"codec": codec, "rest": rest, "prefill": prefill, "merge": merge}
    given = {name: value for name, value in options.items() if value is not None}
    method, parameters = _split(method, {**parameters, **given})
    codec, rest, prefill, merge = (parameters.pop(name, None) for name in options)
    info = method_info(method)
    check_parameters(info, parameters)
    _check_pooling(info, parameters)
    values = dict(parameters)
    paper = values.pop("paper", False)
    if not isinstance(paper, bool):
        raise PlanError(f"{info.name}: paper must be True or False, got {paper!r}")
    values = _with_floor(info, values, 0 if paper else budgets.FLOOR)
    if paper and values.get("profile") is not None:
        raise PlanError(f"{info.name}: paper=True and profile= are two sources of the same parameters; leave one out")
    result = _as_in_paper(info, values) if paper else plan_of(info, values)
    _check_floor(result, parameters.get("floor") or 0)
    if info.adapts and not paper and values.pop("profile", None) is None:
        unset = Unset(info.name, values if merge is None else {**values, "merge": merge})
        result = dataclasses.replace(result, unset=unset)
    result = with_merge(result, merge)
    parts: tuple[tuple[str, Any, Callable[[Any], Any], str], ...] = (
        ("codec", codec, codec_of, "is a codec itself"),
        ("rest", rest, rest_of, "keeps the rest itself"),
        ("prefill", prefill, prefill_of, "reads prompts sparsely itself"),
    )
    for role, value, read, clash in parts:
        if value is not None and vars(result)[role] is not None:
            raise PlanError(f"{info.name} {clash}, got {role}={short(value)} as well; leave one of them out")
        if value is not None:
            result = dataclasses.replace(result, **{role: read(value)})
    return result


def _check_pooling(info: MethodInfo, given: Mapping[str, Any]) -> None:
    """Raise PlanError for a kind of pooling other than the default with a kernel that pools nothing."""
    default = info.parameters.get("pooling")
    if given.get("kernel") == 1 and given.get("pooling", default) != default:
        raise PlanError(f"{info.name}: pooling={short(given['pooling'])} has no effect with kernel=1; leave it out")


def _as_in_paper(info: MethodInfo, arguments: Mapping[str, Any]) -> Plan:
    """Return the plan of a method, and of its base if it has one, with the papers' parameters unless given."""
    values = as_in_paper(info, arguments)
    inner = {name.removeprefix("base."): value for name, value in values.items() if name.startswith("base.")}
    result = plan_of(info, {**{name: value for name, value in values.items() if "." not in name}, **arguments})
    base = base_of(result.evict)
    if not inner or result.evict is None or base is None:
        return result
    ranking: Evictor = dataclasses.replace(base, **inner)  # type: ignore[type-var]
    return dataclasses.replace(result, evict=dataclasses.replace(result.evict, base=ranking))  # type: ignore[type-var]


def _split(method: str, parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and parameters, including those after the name. Raises PlanError."""
    if not isinstance(method, str) or not any(mark in method for mark in ":;,"):
        return method, parameters
    specs = split_specs(method)
    if len(specs) != 1:
        raise PlanError(f"plan takes one method, e.g. plan('snapkv:budget=20%'), got {method!r}")
    (name, written) = specs[0]
    twice = sorted(written.keys() & parameters.keys())
    if twice:
        raise PlanError(f"{twice[0]} is given twice, in {method!r} and as {twice[0]}=; leave one out")
    return name, {**written, **parameters}


def plan_without_floor(method: str, **parameters: Any) -> Plan:
    """Make a Plan as `plan` does, with shares without a floor unless one is given, for measurements."""
    return plan(method, **{**({"floor": 0} if method_info(method).takes_floor else {}), **parameters})


def _with_floor(info: MethodInfo, arguments: Mapping[str, Any], usual: int) -> dict[str, Any]:
    """Return parameters with a floor of shares: the given one, alone or in a budget, else the usual one; 0 is dropped.

    Raises:
        PlanError: the floor is no number of entries.
    """
    floor = arguments.get("floor")
    rest = {name: value for name, value in arguments.items() if name != "floor"}
    if floor is None and any(map(has_floor, rest.values())):
        return rest
    if floor is None:
        floor = usual if info.takes_floor else 0
    if not Budget(ratio=1.0, floor=floor).floor:
        return {name: without_floor(value) for name, value in rest.items()}
    return {**rest, "floor": floor}


def _check_floor(whole: Plan, floor: int) -> None:
    """Raise PlanError for a floor of a plan with a budget that is no share and may be smaller."""
    for budget in (budget for role in whole.roles for budget in budgets_of(vars(whole)[role])):
        if (floor and budget.bytes is not None) or (budget.tokens is not None and budget.tokens < floor):
            raise PlanError(
                f"{whole.name}: floor={floor} is the least that a share keeps, and {budget} is none; give a share like "
                "budget='20%', or leave floor= out"
            )


def crossed(
    methods: Iterable[tuple[str, Mapping[str, Any]]],
    codecs: Sequence[str | None],
    rests: Sequence[str | None],
    prefills: Sequence[str | None] = (None,),
) -> list[tuple[str, dict[str, Any]]]:
    """Combine methods with codecs, rests and prefills.

    A method that is a codec gets no other codec, one that drops nothing no rest, one that is a sparse prefill no other.

    Args:
        methods: names, with given parameters.
        codecs: as text, None for none.
        rests: of evicted entries, likewise.
        prefills: sparse prefills, likewise.

    Raises:
        PlanError: there are rests, and no method evicts.
    """
    out = []
    evicts = False
    for name, settings in methods:
        info = method_info(name)
        example = info.make(**info.example)
        drops = example.evict is not None and example.rest is None and not example.evict.traits.is_view
        evicts = evicts or drops
        for codec in (None,) if info.is_codec else codecs:
            for rest in rests if drops else (None,):
                for prefill in (None,) if example.prefill is not None else prefills:
                    parts = {"codec": codec, "rest": rest, "prefill": prefill}
                    out.append((name, {**settings, **{role: part for role, part in parts.items() if part is not None}}))
    if any(rests) and out and not evicts:
        raise PlanError(
            f"rest={next(filter(None, rests))} keeps what an evictor would drop, and none of the methods named has "
            "such a rest; name one that evicts, such as snapkv"
        )
    return out


def rest_text(text: str) -> str:
    """Return a codec in the form for `codec_of`: "rotated:bits=2" for "2bit", any other text unchanged."""
    bits = _BITS.fullmatch(text.strip())
    return f"{_REST}:bits={bits[1]}" if bits else text


def rest_of(value: Codec | str) -> Codec:
    """Return a codec for evicted entries. Raises PlanError."""
    if isinstance(value, str):
        return codec_of(rest_text(value))
    if isinstance(value, Codec):
        return value
    raise PlanError(f"rest= takes '2bit', '3bit', '4bit', a Codec or its name, got {short(value)}")


def codec_of(value: Codec | str) -> Codec:
    """Return a codec, parsing text such as ``kivi:bits=4``. Raises PlanError."""
    codec = value if isinstance(value, Codec) else _alone("codec", value, "kivi:bits=4").codec
    assert codec is not None
    return codec


def prefill_of(value: SparsePrefill | str) -> SparsePrefill:
    """Return a SparsePrefill, parsing text such as ``xattention:threshold=0.9``. Raises PlanError."""
    prefill = (
        value if isinstance(value, SparsePrefill) else _alone("prefill", value, "xattention:threshold=0.9").prefill
    )
    assert prefill is not None
    return prefill


def _alone(role: str, value: Any, example: str) -> Plan:
    """Return the plan of a method, given as text, that has only this role. Raises PlanError."""
    if not isinstance(value, str):
        raise PlanError(f"{role}= takes a {ROLES[role].__name__}, or its name such as {example!r}, got {short(value)}")
    specs = split_specs(value)
    if len(specs) != 1:
        raise PlanError(f"{role}= takes one {role}, got {value!r}")
    ((name, settings),) = specs
    info = method_info(name)
    if info.roles != (role,):
        known = [method for method in list_methods() if method_info(method).roles == (role,)]
        raise role_error(info.name, role, known)
    # Those of the method alone: a codec in the text of a codec would be lost.
    check_parameters(info, settings)
    return plan(info.name, **settings)
