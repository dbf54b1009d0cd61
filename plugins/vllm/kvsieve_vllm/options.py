"""The plugin's options, as given by users and passed between processes of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsieve import plan as plan_named
from kvsieve.errors import PlanError, short
from kvsieve.planning.plans import Plan
from kvsieve_vllm.names import KEY, asked_for

_FIELDS = ("plan", "settled", "self_test")


@dataclass(frozen=True)
class EngineOptions:
    """A plan for an engine.

    Attributes:
        plan: as the user wrote it, or completed for a model.
        text: as the user wrote it.
        settled: the plan is complete for the model.
        self_test: attend sparsely to all pages, and evict by packing everything in reverse, so that tests can compare
            with dense attention.
    """

    plan: Plan
    text: str
    settled: bool = False
    self_test: bool = False

    @classmethod
    def given(cls, additional_config: Any) -> EngineOptions | None:
        """Return the options in vLLM's `additional_config`, or in the environment; None without any.

        Args:
            additional_config: a dict with "kvsieve": a plan as text, or a dict with "plan".

        Raises:
            PlanError: invalid options or plan.
        """
        found = asked_for(additional_config)
        if found is None:
            return None
        if isinstance(found, str):
            found = {"plan": found}
        if not isinstance(found, Mapping) or not isinstance(found.get("plan"), str) or found.keys() - set(_FIELDS):
            raise PlanError(
                f'additional_config["{KEY}"] takes a plan such as "METHOD:budget=256", or a dict with "plan" and, for '
                f'tests, "self_test"; got {short(found)}'
            )
        text = found["plan"]
        settled = found.get("settled")
        plan = Plan.from_dict(settled) if settled is not None else plan_named(text)
        return cls(plan, text, settled is not None, bool(found.get("self_test", False)))

    def handed_on(self) -> dict[str, Any]:
        """Return the input of `given` for the engine's other processes."""
        return {"plan": self.text, "settled": self.plan.to_dict(), "self_test": self.self_test}
