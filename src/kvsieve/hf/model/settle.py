"""Completion of a plan for a model: budgets in bytes, unset parameters, and the tokenizer's."""

from __future__ import annotations

from typing import Any

from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Fingerprint
from kvsieve.planning.settled import settled


def plan_for(plan: Plan, model: Any, tokenizer: Any = None) -> Plan:
    """Return a fully specified plan; see `Plan.for_model`."""
    if plan.budgets_in_bytes and not isinstance(model, Fingerprint):
        # transformers' own; a Fingerprint works without.
        from kvsieve.hf.model.memory import fit_model

        plan = fit_model(plan, model)
    plan = settled(plan, model, tokenizer)
    return plan if tokenizer is None else plan.for_tokenizer(tokenizer)
