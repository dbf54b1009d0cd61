"""The plugin's options as a user gives them, and as the processes of an engine hand them on."""

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
        plan: as the user wrote it, or settled for a model.
        text: as the user wrote it.
        settled: nothing of the plan is left to the model.
        self_test: read sparsely even what is read whole, and evict by packing everything in reverse, so that tests can
            compare with dense attention.
    """

    plan: Plan
    text: str
    settled: bool = False
    self_test: bool = False

    @classmethod
    def given(cls, additional_config: Any) -> EngineOptions | None:
        """Read them from vLLM's `additional_config`, or from the environment; None where there are none.

        Args:
            additional_config: a dict whose "kvsieve" is a plan as text, or a dict with "plan".

        Raises:
            PlanError: the options or the plan cannot be read.
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
        """Return what `given` reads, for the engine's other processes."""
        return {"plan": self.text, "settled": self.plan.to_dict(), "self_test": self.self_test}
