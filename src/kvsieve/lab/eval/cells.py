"""Settings of an evaluation: methods crossed with budgets, and where they differ by more than the method."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvsieve.errors import KvsieveWarning, PlanError
from kvsieve.planning.budget import Budget
from kvsieve.planning.loading import BUILT_IN, REGISTERED, canonical
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import method_info
from kvsieve.planning.settled import all_parameters, label_parameters
from kvsieve.report.labels import FULL

# Parameters set by a model or a paper that can matter more than the method.
COMPARED = ("window", "kernel", "pooling")


@dataclass(frozen=True)
class MethodSetting:
    """One method at one budget.

    label: the method and its given parameters without the budget: "snapkv kernel=21 codec=kivi:bits=4"; for_model adds
    those that the model sets. budget: as text, None for a method without one. parameters: all, JSON-ready.
    """

    method: str
    label: str
    budget: str | None
    parameters: dict[str, Any]
    plan: Plan
    given: dict[str, Any] = field(default_factory=dict)

    def for_model(self, model: Any, tokenizer: Any = None) -> MethodSetting:
        """Return this setting with plan, parameters and label fully specified; see Plan.for_model. Raises PlanError."""
        return _setting(self.method, self.given, self.plan.for_model(model, tokenizer))

    def described(self) -> dict[str, Any]:
        """Return the entry of a results directory."""
        names = ("label", "budget", "method", "parameters")
        paper = {"paper": True} if self.given.get("paper") else {}
        return {**{name: getattr(self, name) for name in names}, **paper}


def setting(method: str, arguments: dict[str, Any]) -> MethodSetting:
    """Return a setting with shares without a floor unless `arguments` set one, so that effects show on short prompts.

    Raises PlanError.
    """
    return _setting(method_info(method).name, arguments, plan_without_floor(method, **arguments))


def _setting(method: str, arguments: dict[str, Any], plan: Plan) -> MethodSetting:
    shown = all_parameters(method, {"floor": 0, **arguments}, plan.filled)
    if not shown["floor"]:
        del shown["floor"]
    if "budget" in shown:
        shown["budget"] = str(Budget.parse(shown["budget"]))
    named = " ".join(
        f"{name}={value}"
        for name, value in label_parameters(method, arguments, plan.filled).items()
        if name != "budget"
    )
    label = f"{method} {named}".strip()
    return MethodSetting(method, label, shown.get("budget"), shown, dataclasses.replace(plan, name=label), arguments)


def settings(methods: Sequence[tuple[str, dict[str, Any]]], budgets: Sequence[str]) -> list[MethodSetting]:
    """Return full KV, named or not, then each budget with all methods.

    methods: names and given parameters. A method with a budget that was not given runs at each of `budgets` (default:
    its own). Raises PlanError, also for a duplicate.
    """
    out = [setting(FULL, {})]
    choices: Sequence[str | None] = budgets or [None]
    for budget in choices:
        for method, parameters in methods:
            info = method_info(method)
            if info.name == FULL and not (parameters.get("codec") or parameters.get("prefill")):
                continue
            takes = "budget" in info.parameters and "budget" not in parameters
            one = setting(method, {**parameters, "budget": budget} if takes and budget is not None else parameters)
            if not takes and one in out and budget != choices[0]:
                continue
            # `paper` changes a label only once the model is known.
            _check_new(one, out, lambda known: (known.label, known.budget, known.given.get("paper", False)))
            out.append(one)
    return out


def on_model(settings: Sequence[MethodSetting], model: Any, tokenizer: Any = None) -> list[MethodSetting]:
    """Return fully specified settings. Raises PlanError, also for two that become equal."""
    out: list[MethodSetting] = []
    for setting in settings:
        one = setting.for_model(model, tokenizer)
        _check_new(one, out, lambda known: (known.label, known.budget))
        out.append(one)
    return out


def _check_new(one: MethodSetting, others: Sequence[MethodSetting], identity: Callable[[MethodSetting], Any]) -> None:
    if any(identity(one) == identity(other) for other in others):
        raise PlanError(f"{one.label!r} at a budget of {one.budget} is named twice; name each setting once")


def warn_unlike(settings: Sequence[MethodSetting]) -> None:
    """Warn (KvsieveWarning) if compared methods run with different settings."""
    found = unlike_settings(settings)
    if found:
        warnings.warn(
            f"compared methods run with unlike settings: {'; '.join(found)}; give both the same values where only the "
            "methods should differ",
            KvsieveWarning,
            stacklevel=2,
        )


def unlike_settings(settings: Sequence[MethodSetting]) -> list[str]:
    """Return a clause for each parameter in which a method shares no value with the first one.

    Two methods of kvsieve that both have their own defaults, or those of the model, differ by design and are skipped.
    """
    methods: dict[str, list[MethodSetting]] = {}
    for setting in settings:
        if setting.plan.roles:
            methods.setdefault(setting.method, []).append(setting)
    found = []
    first = next(iter(methods), "")
    for method, own in methods.items():
        for name in COMPARED:
            here, there = (
                parameter_values([setting.parameters for setting in some], name) for some in (methods[first], own)
            )
            chosen = any(_is_chosen(setting, name) for setting in (*methods[first], *own))
            if chosen and here and there and not set(here) & set(there):
                found.append(f"{name} is {' or '.join(here)} in {first} and {' or '.join(there)} in {method}")
    return found


def parameter_values(parameters: Iterable[Mapping[str, Any]], name: str) -> list[str]:
    """Return the values of a parameter, or of a wrapper's base, in several settings."""
    found = (values.get(name, values.get(f"base.{name}")) for values in parameters)
    return list(dict.fromkeys(str(value) for value in found if value is not None))


def _is_chosen(setting: MethodSetting, name: str) -> bool:
    """Return True if a value was given, comes from ``paper=True``, or belongs to a method outside kvsieve."""
    built_in = REGISTERED.get(canonical(setting.method), "").startswith(BUILT_IN)
    return not built_in or name in setting.given or bool(setting.given.get("paper"))
