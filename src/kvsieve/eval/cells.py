"""What an evaluation runs: methods crossed with budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.budget import Budget
from kvsieve.errors import PlanError
from kvsieve.eval.results import FULL
from kvsieve.plans import Plan, all_parameters, plan
from kvsieve.registry import method_info


@dataclass(frozen=True)
class Setting:
    """One method at one budget.

    label: the method and the parameters that were given, the budget apart: "snapkv kernel=21". budget: as text, None
    for a method without one. parameters: all of them, JSON-ready.
    """

    method: str
    label: str
    budget: str | None
    parameters: dict[str, Any]
    plan: Plan

    def described(self) -> dict[str, Any]:
        """What a results directory says of it."""
        names = ("label", "budget", "method", "parameters")
        return {name: getattr(self, name) for name in names}


def setting(method: str, given: dict[str, Any]) -> Setting:
    """Raises PlanError."""
    info = method_info(method)
    made = plan(method, **given)
    shown = all_parameters(method, given)
    if "budget" in shown:
        shown["budget"] = str(Budget.parse(shown["budget"]))
    named = " ".join(f"{name}={value}" for name, value in given.items() if name != "budget")
    label = f"{info.name} {named}".strip()
    return Setting(info.name, label, shown.get("budget"), shown, dataclasses.replace(made, name=label))


def settings(methods: Sequence[tuple[str, dict[str, Any]]], budgets: Sequence[str]) -> list[Setting]:
    """Full KV first, whether it is named or not, then each budget with all methods.

    methods: names and given parameters. A method that takes a budget and was given none runs at each of `budgets` (at
    its default without any). Raises PlanError, also for a setting that is named twice.
    """
    out = [setting(FULL, {})]
    for budget in budgets or [None]:
        for method, given in methods:
            info = method_info(method)
            if info.name == FULL:
                continue
            takes = "budget" in info.parameters and "budget" not in given
            one = setting(method, {**given, "budget": budget} if takes and budget is not None else given)
            if not takes and one in out and budget != (budgets or [None])[0]:
                continue
            if any((one.label, one.budget) == (other.label, other.budget) for other in out):
                raise PlanError(f"{one.label!r} at a budget of {one.budget} is named twice; name each setting once")
            out.append(one)
    return out
