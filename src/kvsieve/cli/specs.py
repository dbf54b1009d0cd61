"""Methods in command-line syntax: ``snapkv:kernel=21:window=16``, separated by commas.

A colon or a semicolon precedes each parameter; shells need quotes around a semicolon. A colon that no ``name=`` follows
belongs to the value, such as a file's name.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from kvsieve.cli.options import METHOD, option
from kvsieve.errors import KvsieveWarning, PlanError
from kvsieve.planning.budget import percent_doubt
from kvsieve.planning.named import codec_of, crossed, plan, plan_without_floor, prefill_of, rest_of
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import load_profile
from kvsieve.planning.registry import check_parameters, method_info
from kvsieve.planning.settled import all_parameters, held_parameters, label_parameters
from kvsieve.planning.specs import parse_settings, split_specs

BudgetOption = Annotated[
    str | None,
    option(
        METHOD,
        "KV entries kept per layer and head: 20%, 2048, 8k or 512MiB (default: the method's; a share keeps "
        "at least 512)",
    ),
]
CodecOption = Annotated[
    str | None, option(METHOD, "Codec that quantizes the KV cache: kivi:bits=4, int8 (default: none)")
]
CodecsOption = Annotated[str | None, option(METHOD, "Codecs, each method under each: none,kivi:bits=4 (default: none)")]
RestOption = Annotated[
    str | None, option(METHOD, "Codec for entries the method would evict: 2bit, 3bit, kivi:bits=2 (default: evicted)")
]
RestsOption = Annotated[
    str | None, option(METHOD, "Codecs for entries methods would evict: none,2bit,kivi (default: evicted)")
]
PrefillOption = Annotated[
    str | None, option(METHOD, "Sparse attention of the prefill: xattention:threshold=0.9 (default: dense)")
]
PrefillsOption = Annotated[
    str | None,
    option(METHOD, "Sparse attention of the prefill, each method under each: none,xattention (default: dense)"),
]
# Parameters of a plan that have options of their own.
PARTS = ("codec", "rest", "prefill")
Spec = tuple[str, dict[str, Any]]
Listed = list[str | None]


@dataclass(frozen=True)
class MethodRun:
    """A method to run: its name, its given parameters, and their plan; see `for_model`."""

    name: str
    given: dict[str, Any]
    plan: Plan

    @property
    def label(self) -> str:
        return spec(self.name, self.given)

    @property
    def full_label(self) -> str:
        """Label of its results, including parameters that came from the model but not the paper's; see settled."""
        return spec(self.name, label_parameters(self.name, self.given, self.plan.filled))

    @property
    def parameters(self) -> dict[str, Any]:
        return all_parameters(self.name, self.given, self.plan.filled)

    def for_model(self, model: Any, tokenizer: Any = None) -> MethodRun:
        """Return this run with a fully specified plan; see Plan.for_model. Raises PlanError."""
        return replace(self, plan=self.plan.for_model(model, tokenizer))


def spec(method: str, given: dict[str, Any]) -> str:
    """Format a method as `split_specs` reads it, with --codec, --rest and --prefill after a space."""
    settings = ":".join(f"{name}={value}" for name, value in given.items() if name not in PARTS)
    parts = [f" {role}={given[role]}" for role in PARTS if given.get(role)]
    return "".join([f"{method}:{settings}" if settings else method, *parts])


def run_line(model: str | None, options: Mapping[str, object]) -> str:
    """Return a command line of `kvsieve run` with a short prompt, to copy.

    options: values of further options, by name with hyphens; those that are None, or "auto", are left out.
    """
    words = ["kvsieve", "run", *([] if model is None else [model]), "--prompt", "What is the capital of France?"]
    for name, value in options.items():
        words += [] if value in (None, "auto") else [f"--{name}", str(value)]
    return shlex.join(words)


def parse_codecs(text: str | None) -> Listed:
    """Return the codecs of a list like ``none,kivi:bits=4`` as text, None for none. Raises PlanError."""
    return _parse_listed(text, "--codec", codec_of, "kivi:bits=4")


def parse_rests(text: str | None) -> Listed:
    return _parse_listed(text, "--rest", rest_of, "2bit")


def parse_prefills(text: str | None) -> Listed:
    return _parse_listed(text, "--prefill", prefill_of, "xattention")


def parse_parts(codec: str | None, rest: str | None, prefill: str | None) -> tuple[Listed, Listed, Listed]:
    """Return the codecs, rests and prefills of --codec, --rest and --prefill; see `parse_codecs`. Raises PlanError."""
    return parse_codecs(codec), parse_rests(rest), parse_prefills(prefill)


def _parse_listed(text: str | None, option: str, make: Callable[[str], Any], example: str) -> Listed:
    found: Listed = []
    for name, parameters in split_specs("none" if text is None else text):
        one = None if name == "none" and not parameters else spec(name, parameters)
        if one is not None:
            make(one)
        if one in found:
            raise PlanError(f"{option} names {one or 'none'} twice, in {text!r}; name each once")
        found.append(one)
    what = "sparse prefill" if option == "--prefill" else "codec"
    if not found:
        raise PlanError(f"{option} names no {what}, got {text!r}; write e.g. {example}, or none,{example}")
    return found


def make_runs(
    specs: Iterable[Spec],
    codecs: Sequence[str | None] = (None,),
    rests: Sequence[str | None] = (None,),
    prefills: Sequence[str | None] = (None,),
) -> list[MethodRun]:
    """Return the runs of methods, each with every codec, rest and prefill it supports; see `named.crossed`.

    Raises PlanError.
    """
    return [make_run(name, **parameters) for name, parameters in crossed(specs, codecs, rests, prefills)]


def make_run(method: str, /, **given: Any) -> MethodRun:
    """Return the run of a method, and warn (KvsieveWarning) about a budget that may be meant in percent.

    Raises PlanError.
    """
    if "method" in given:
        check_parameters(method_info(method), given)
    method_plan = plan(method, **given)
    ask_back(given.get("budget"))
    return MethodRun(method_info(method).name, given, method_plan)


def ask_back(budget: Any) -> None:
    """Warn (KvsieveWarning) about a budget that may be meant in percent. Raises PlanError."""
    doubt = percent_doubt(budget)
    if doubt is not None:
        warnings.warn(doubt, KvsieveWarning, stacklevel=3)


def measured(run: MethodRun) -> MethodRun:
    """Return the run with shares without a floor, unless it names one, as measurements need."""
    return replace(run, plan=plan_without_floor(run.name, **run.given))


def chosen_spec(method: str, budget: str | None, settings: list[str], profile: str | None = None) -> Spec:
    """Return the method of --method, --budget, --set and --profile, with checked names. Raises PlanError.

    method: a name, or one with parameters, ``snapkv:kernel=21``.
    """
    specs = split_specs(method)
    if len(specs) != 1:
        raise PlanError(f"--method takes one method, e.g. snapkv:kernel=21, got {method!r}")
    (name, written), more = specs[0], parse_settings(settings)
    info = method_info(name)
    for twice in written.keys() & more.keys():
        raise PlanError(f"{twice} is given twice, in --method {method} and as --set {twice}={more[twice]}")
    parameters = written | more
    if budget is not None:
        if "budget" not in info.parameters:
            raise PlanError(f"{info.name} takes no budget, got --budget {budget}; leave the option out")
        if "budget" in parameters:
            where = f"in --method {method}" if "budget" in written else f"--set budget={parameters['budget']}"
            raise PlanError(f"the budget is given twice, as --budget {budget} and {where}")
        parameters["budget"] = budget
    if profile is not None:
        if "profile" not in info.parameters:
            raise PlanError(f"{info.name} takes no profile, got --profile {profile}; leave the option out")
        parameters.setdefault("profile", profile)
    check_parameters(info, parameters)
    return info.name, parameters


def compared_specs(text: str, budget: str | None, profile: str | None = None) -> list[Spec]:
    """Return the methods of --compare, ``full,snapkv:kernel=21:window=16``, with checked names.

    They get the budget and the profile if they take one and have none. Raises PlanError.
    """
    specs = method_specs(text)
    for method, parameters in specs:
        if budget is not None and "budget" in method_info(method).parameters:
            parameters.setdefault("budget", budget)
        if profile is not None and _has_profile(method, profile):
            parameters.setdefault("profile", profile)
    return specs


def _has_profile(method: str, profile: str) -> bool:
    """Return whether a method reads profiles, or this one has parameters for it; see held_parameters."""
    info = method_info(method)
    usable = info.takes_profile or held_parameters(info, load_profile(profile)) is not None
    return "profile" in info.parameters and usable


def check_budget_used(option: str, budget: str | None, specs: Sequence[Spec]) -> None:
    """Raise PlanError for a given budget if no method takes one, or all have their own."""
    free = ("budget" in method_info(name).parameters and "budget" not in given for name, given in specs)
    if budget and not any(free):
        raise PlanError(f"no method named takes the budget of {option} {budget}, or all have their own; leave it out")


def compared_methods(text: str, budget: str | None, profile: str | None = None) -> list[MethodRun]:
    return [make_run(name, **parameters) for name, parameters in compared_specs(text, budget, profile)]


def method_specs(text: str) -> list[Spec]:
    """Return names and parameters of a list like ``full,snapkv:kernel=21:window=16``, checked. Raises PlanError."""
    found = [(method_info(name), parameters) for name, parameters in split_specs(text)]
    for info, parameters in found:
        check_parameters(info, parameters)
    return [(info.name, parameters) for info, parameters in found]
