"""The attached model under the plans of requests."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

from kvsieve.hf.attach import under
from kvsieve.hf.sieve import Sieve
from kvsieve.planning.plans import Plan


class PlanSieves:
    """Cache of sieves for the plans used last. For one thread.

    Args:
        sieve: attached for any plan.
        most: plans in the cache.
    """

    def __init__(self, sieve: Sieve, most: int = 64) -> None:
        self._sieve = sieve
        self._most = most
        self._known: OrderedDict[Hashable, Sieve] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, plan: Plan) -> Sieve:
        """Return the model under a plan. Raises PlanError or UnsupportedModelError if it cannot run."""
        key = plan_key(plan)
        if key not in self._known:
            self._known[key] = under(self._sieve, plan)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def plan_key(plan: Plan) -> Hashable:
    """Return a key that two plans share only if they have the same effect and description."""
    return _key(plan), plan.name, str(plan.filled)


def _key(value: Any) -> Hashable:
    # Types count: a budget of 1 is one entry, and a budget of 1.0 is all of them.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return type(value), *(_key(getattr(value, name)) for name in fields)
    if isinstance(value, (list, tuple)):
        return type(value), *map(_key, value)
    if isinstance(value, Mapping):
        return type(value), *((_key(name), _key(item)) for name, item in value.items())
    try:
        hash(value)
    except TypeError:
        # An array or the like, kept alive by the cached plan.
        return type(value), id(value)
    return type(value), value
