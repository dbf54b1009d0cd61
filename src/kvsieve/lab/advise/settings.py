"""Plans to measure: methods crossed with budgets, or with the share that fits into the memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsieve.errors import KvsieveError, PlanError
from kvsieve.hf.model.support import check_model
from kvsieve.lab.advise.choose import size
from kvsieve.lab.advise.measure import certain_memory_at, least_memory_at
from kvsieve.lab.advise.options import BUDGETS, AdviceOptions
from kvsieve.lab.eval.cells import MethodSetting, setting
from kvsieve.lab.eval.evaluator import Evaluator
from kvsieve.planning.named import crossed, plan, plan_without_floor
from kvsieve.planning.registry import list_methods, method_info
from kvsieve.planning.roles import budgets_of
from kvsieve.report.labels import FULL

# Parts of the share that fits into the memory.
_PARTS = (1.0, 0.5)
_STEPS = 1000


def candidates(evaluator: Evaluator, options: AdviceOptions) -> tuple[list[MethodSetting], list[str]]:
    """Return the settings to measure, full KV first, and the skipped ones with reasons.

    Raises PlanError for a method that cannot be measured, if it was named with parameters, and if no plan remains or
    fits into the memory.
    """
    too_large: list[tuple[int, str]] = []
    model = evaluator.model
    found = [setting(FULL, {})]
    left_out = []
    for method, given in crossed(options.methods, options.codecs, options.rests, options.prefills):
        if method == FULL and not given.keys() & {"codec", "prefill"}:
            continue
        try:
            budgets = _budgets(evaluator, options, method, given)
            parameters = [_without_binding_floor(method, {**given, **budget}, options.context) for budget in budgets]
            settings = [setting(method, chosen).for_model(model, evaluator.prompter.tokenizer) for chosen in parameters]
            for one in settings:
                check_model(model, one.plan)
                least_memory_at(evaluator, one.plan, options.context)
        except KvsieveError as error:
            if given.keys() - {"codec", "rest", "prefill"} or len(options.methods) == 1:
                raise
            left_out.append(f"{method}: {error}")
            continue
        for one in settings:
            # The entries missing in deep layers are known only by measuring.
            bytes_there = certain_memory_at(evaluator, one.plan, options.context)
            if options.limits.memory is not None and bytes_there > options.limits.memory:
                too_large.append((bytes_there, f"{one.label} {one.budget or ''}"))
            else:
                found.append(one)
    if len(found) == 1 and too_large:
        least, name = min(too_large)
        raise PlanError(
            f"no plan keeps to KV of at most {size(options.limits.memory or 0)} at {options.context} tokens: the "
            f"nearest, {name}, stores at least {size(least)}, {least / (options.limits.memory or 1):.3g} times as "
            "much; raise --memory, or lower --budgets"
        )
    if len(found) == 1:
        raise PlanError(f"no plan can be measured: {'; '.join(left_out)}; change --methods or the limits")
    left_out += [f"{name}: it stores at least {size(count)}" for count, name in too_large]
    named = {method_info(method).name for method, _ in options.methods}
    others = [name for name in list_methods() if name not in {*named, FULL}]
    left_out.append(f"other methods: {', '.join(others)} (--methods measures them)")
    return found, left_out


def _without_binding_floor(method: str, given: dict[str, Any], context: int) -> dict[str, Any]:
    """Return parameters with ``floor=0`` if a plan made by name would otherwise keep more of the context.

    Plans are measured without a floor, and the recommended one must keep what was measured.
    """
    usual = plan(method, **given)
    measured = plan_without_floor(method, **given)
    budgets = [[budget for role in part.roles for budget in budgets_of(vars(part)[role])] for part in (usual, measured)]
    shares = [(one, other) for one, other in zip(*budgets, strict=True) if one.ratio is not None]
    binds = any(one.entries(context) != other.entries(context) for one, other in shares)
    return {**given, "floor": 0} if binds else given


def _budgets(
    evaluator: Evaluator, options: AdviceOptions, method: str, given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    if "budget" not in method_info(method).parameters or "budget" in given:
        return [{}]
    if options.budgets:
        return [{"budget": budget} for budget in options.budgets]
    if options.limits.memory is None:
        return [{"budget": budget} for budget in BUDGETS]
    share = _largest_share(evaluator, options, method, given)
    # The smallest if none fits; the report states that.
    shares = [share * part for part in _PARTS if share * part > 0.005] or [1 / _STEPS]
    return [{"budget": f"{100 * share:.3g}%"} for share in shares]


def _largest_share(evaluator: Evaluator, options: AdviceOptions, method: str, given: Mapping[str, Any]) -> float:
    """Return the largest share, in steps of a thousandth, with a cache that fits into the memory; 0 for none.

    For a method that stores everything, return the first of the usual shares.
    """
    limit = options.limits.memory or 0

    def fits(step: int) -> bool:
        plan = setting(method, {**given, "budget": f"{100 * step / _STEPS:g}%"}).plan
        plan = plan.for_model(evaluator.model, evaluator.prompter.tokenizer)
        return least_memory_at(evaluator, plan, options.context) <= limit

    low = 0
    high = _STEPS - 1
    if fits(high):
        return high / _STEPS
    while high - low > 1:
        middle = (low + high) // 2
        try:
            low, high = (middle, high) if fits(middle) else (low, middle)
        except PlanError:
            low = middle
    return low / _STEPS
