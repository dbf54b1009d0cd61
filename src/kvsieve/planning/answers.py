"""Budgets of answers: the options `answer` and `grows` of evictors that act while decoding."""

from __future__ import annotations

from kvsieve.errors import PlanError
from kvsieve.planning.budget import Budget
from kvsieve.planning.roles import Evictor

# The part of the budget that the prompt left.
REMAINING = "remaining"


def parse_answer(
    evictor: Evictor, answer: Budget | str | int | float | None, every: int | None, *, why: str
) -> Budget | str | None:
    """Return `answer` as a Budget, "remaining" or None.

    Args:
        evictor: with `answer`, or with `grows`.
        answer: as given.
        every: its option of that name.
        why: the reason of its `minimum`.

    Raises:
        PlanError: the answer is no budget, or an option would do nothing.
    """
    name = type(evictor).__name__
    budget = evictor.budget
    if every is None:
        given = "grows" if answer is None else "answer"
        raise PlanError(f"{name}: {given}= is about eviction while decoding; give every= as well, such as every=64")
    if evictor.grows and budget.ratio is None:
        raise PlanError(f"{name}: grows=True is about a share of all tokens, and the budget is {budget}")
    if answer is None:
        return None
    if answer == REMAINING:
        if budget.ratio is not None and not evictor.grows:
            raise PlanError(
                f"{name}: answer={REMAINING!r} is the part of the budget that the prompt left, and a prompt leaves "
                f"nothing of {budget} of itself; give a number of entries as budget=, or grows=True"
            )
        return REMAINING
    parsed = Budget.parse(answer, "answer")
    parsed.refuse_bytes(name, "answer", "an answer's length is not known in advance")
    parsed.refuse_fewer(evictor.minimum, name, why, "answer")
    if evictor.grows:
        raise PlanError(f"{name}: with answer={parsed} the budget is the prompt's alone; leave grows= out")
    return parsed


def refuse_answer(owner: object, evictor: Evictor) -> None:
    """Raise PlanError for an evictor with `answer` or `grows`, which `owner` does not honour."""
    if evictor.keeps_prompt or evictor.grows:
        name = "answer" if evictor.keeps_prompt else "grows"
        raise PlanError(
            f"{type(owner).__name__}: {name}= is for evictors that rank entries themselves, like SnapKV; leave it out"
        )
