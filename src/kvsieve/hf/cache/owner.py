"""The model and the plan of a cache."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import nn

from kvsieve.planning.plans import Plan


@dataclass(frozen=True, eq=False)
class Owner:
    """A cache's model, identified by its decoder, and plan.

    Attributes:
        decoder: of the model.
        plan: the plan.
        adopted: True if another plan has prefilled a part of it; see ``Sieve.adopt``.
        adapters: active PEFT adapters of the model.
    """

    decoder: weakref.ref[nn.Module]
    plan: Plan
    adopted: bool = False
    adapters: tuple[str, ...] = ()

    def why_not(self, decoder: nn.Module, plan: Plan, adapters: tuple[str, ...]) -> str | None:
        """Return a clause why a cache is not for this model and plan, or None."""
        if self.decoder() is not decoder:
            return "was made for another model, whose keys and values mean nothing here: use one cache per model"
        if self.adapters != adapters:
            before, now = (", ".join(map(repr, names)) or "no adapter" for names in (self.adapters, adapters))
            return (
                f"was read under {before}, and {now} acts now, which makes other keys and values of the same tokens: "
                "start with a new cache, switch back, or sieve.adopt(cache) to go on with what it holds"
            )
        if self.plan is plan or self.plan == plan:
            return None
        other = f"{self.plan.name!r}" if self.plan.name != plan.name else f"{plan.name!r} with other parameters"
        return (
            f"was made under {other}, and this is {plan.name!r}: attach the plan it was made under, start with a new "
            "cache, or sieve.adopt(cache) to go on under this plan with what the other one has left"
        )
