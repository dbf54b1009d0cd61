"""Methods as they are written on the command line: ``snapkv:kernel=21:window=16``, with a comma between several.

A colon or a semicolon stands before each parameter; a shell ends a command at a semicolon that is not quoted. A colon
that no ``name=`` follows belongs to the value, such as a file's name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from kvsieve.budget import percent_doubt
from kvsieve.errors import KvsieveWarning, PlanError
from kvsieve.named import codec_of, crossed, plan, plan_without_floor, prefill_of, rest_of
from kvsieve.plans import Plan
from kvsieve.profiles import load_profile
from kvsieve.registry import check_parameters, method_info
from kvsieve.roles import Role
from kvsieve.settled import all_parameters, told
from kvsieve.specs import parse_settings, split_specs

BudgetOption = Annotated[
    str | None, typer.Option(help="Entries kept per layer and KV head: 20% (at least 512), 2048 or 512MiB.")
]
CodecOption = Annotated[str | None, typer.Option(help="Hold entries in few bits: kivi:bits=4; see `kvsieve methods`.")]
CodecsOption = Annotated[
    str | None,
    typer.Option(help="Hold entries in few bits, each method under each of a list: kivi:bits=4 or none,kivi:bits=4."),
]

RestOption = Annotated[
    str | None, typer.Option(help="Keep what --method would drop in few bits: 2bit, 3bit, 4bit or kivi:bits=2.")
]
RestsOption = Annotated[
    str | None,
    typer.Option(help="Keep what methods would drop in few bits, each under each of a list: 2bit or none,2bit,kivi."),
]
PrefillOption = Annotated[
    str | None, typer.Option(help="Attend to parts of a prompt only: xattention:threshold=0.9; see `kvsieve methods`.")
]
PrefillsOption = Annotated[
    str | None,
    typer.Option(help="Attend to parts of a prompt only, each method under each of a list: none,xattention."),
]
# Parameters of a plan that have options of their own.
PARTS = ("codec", "rest", "prefill")


@dataclass(frozen=True)
class MethodRun:
    """A method to run: its name, the parameters that were given, and the plan they make; see `for_model`."""

    name: str
    given: dict[str, Any]
    plan: Plan

    @property
    def label(self) -> str:
        """As it is written on the command line."""
        return spec(self.name, self.given)

    @property
    def full_label(self) -> str:
        """Label of its results: with what came from the model, and not that the rest is the paper's; see named.told."""
        return spec(self.name, told(self.name, self.given, self.plan.filled))

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters with their values, JSON-ready."""
        return all_parameters(self.name, self.given, self.plan.filled)

    def for_model(self, model: Any, tokenizer: Any = None) -> MethodRun:
        """This run with a plan in which nothing is left open; see Plan.for_model. Raises PlanError."""
        return replace(self, plan=self.plan.for_model(model, tokenizer))


def spec(method: str, given: dict[str, Any]) -> str:
    """The inverse of `split_specs` for one; what --codec, --rest and --prefill give stands apart."""
    settings = ":".join(f"{name}={value}" for name, value in given.items() if name not in PARTS)
    parts = [f" {role}={given[role]}" for role in PARTS if given.get(role)]
    return "".join([f"{method}:{settings}" if settings else method, *parts])


def parse_codecs(text: str | None) -> list[str | None]:
    """Codecs of a list like ``none,kivi:bits=4``, each as text, None for none. Raises PlanError."""
    return _parse_listed(text, "--codec", codec_of, "kivi:bits=4")


def parse_rests(text: str | None) -> list[str | None]:
    """Codecs of what would be dropped, of a list like ``none,2bit``, each as text, None for none. Raises PlanError."""
    return _parse_listed(text, "--rest", rest_of, "2bit")


def parse_prefills(text: str | None) -> list[str | None]:
    """Sparse prompts of a list like ``none,xattention``, each as text, None for none. Raises PlanError."""
    return _parse_listed(text, "--prefill", prefill_of, "xattention")


def _parse_listed(text: str | None, option: str, check: Callable[[str], Role], example: str) -> list[str | None]:
    found: list[str | None] = []
    for name, given in split_specs("none" if text is None else text):
        one = None if name == "none" and not given else spec(name, given)
        if one is not None:
            check(one)
        if one in found:
            raise PlanError(f"{option} names {one or 'none'} twice, in {text!r}; name each once")
        found.append(one)
    what = "sparse prompt" if option == "--prefill" else "codec"
    if not found:
        raise PlanError(f"{option} names no {what}, got {text!r}; write e.g. {example}, or none,{example}")
    return found


def with_codecs(
    runs: list[MethodRun],
    codecs: list[str | None],
    rests: Sequence[str | None] = (None,),
    prefills: Sequence[str | None] = (None,),
) -> list[MethodRun]:
    """Each run with each codec, rest and prefill that it can have; see `named.crossed`. Raises PlanError."""
    known = [(run.name, run.given) for run in runs]
    return [make_run(name, **given) for name, given in crossed(known, codecs, rests, prefills)]


def make_run(method: str, /, **given: Any) -> MethodRun:
    """Make the run of a method, and ask back (KvsieveWarning) about a budget that may be meant in percent.

    Raises PlanError.
    """
    if "method" in given:
        check_parameters(method_info(method), given)
    made = plan(method, **given)
    ask_back(given.get("budget"))
    return MethodRun(method_info(method).name, given, made)


def ask_back(budget: Any) -> None:
    """Warn (KvsieveWarning) about a budget that may be meant in percent. Raises PlanError."""
    doubt = percent_doubt(budget)
    if doubt is not None:
        warnings.warn(doubt, KvsieveWarning, stacklevel=3)


def measured(run: MethodRun) -> MethodRun:
    """The run with shares that have no floor unless it names one: what measurements take."""
    return replace(run, plan=plan_without_floor(run.name, **run.given))


def chosen_method(method: str, budget: str | None, settings: list[str], profile: str | None = None) -> MethodRun:
    """The run that --method, --budget, --set and --profile describe. Raises PlanError.

    method: a name, or one with parameters, ``snapkv:kernel=21``.
    """
    specs = split_specs(method)
    if len(specs) != 1:
        raise PlanError(f"--method takes one method, e.g. snapkv:kernel=21, got {method!r}")
    (name, written), more = specs[0], parse_settings(settings)
    info = method_info(name)
    for twice in written.keys() & more.keys():
        raise PlanError(f"{twice} is given twice, in --method {method} and as --set {twice}={more[twice]}")
    given = written | more
    if budget is not None:
        if "budget" not in info.parameters:
            raise PlanError(f"{info.name} takes no budget, got --budget {budget}; leave the option out")
        if "budget" in given:
            where = f"in --method {method}" if "budget" in written else f"--set budget={given['budget']}"
            raise PlanError(f"the budget is given twice, as --budget {budget} and {where}")
        given["budget"] = budget
    if profile is not None:
        if "profile" not in info.parameters:
            raise PlanError(f"{info.name} takes no profile, got --profile {profile}; leave the option out")
        given.setdefault("profile", profile)
    return make_run(name, **given)


def compared_methods(text: str, budget: str | None, profile: str | None = None) -> list[MethodRun]:
    """The runs that --compare lists: ``full,snapkv:kernel=21:window=16``.

    They get the budget and the profile where they take one and were not given their own. Raises PlanError.
    """
    runs = []
    for method, given in method_specs(text):
        info = method_info(method)
        if budget is not None and "budget" in info.parameters:
            given.setdefault("budget", budget)
        if (
            profile is not None
            and "profile" in info.parameters
            and (info.takes_profile or info.name in load_profile(profile).parameters)
        ):
            given.setdefault("profile", profile)
        runs.append(make_run(method, **given))
    return runs


def method_specs(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and parameters of a list like ``full,snapkv:kernel=21:window=16``. Raises PlanError."""
    specs = []
    for method, given in split_specs(text):
        info = method_info(method)
        check_parameters(info, given)
        specs.append((info.name, given))
    return specs
