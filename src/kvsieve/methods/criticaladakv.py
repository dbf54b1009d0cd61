"""CriticalAdaKV: CriticalKV (arXiv 2502.03805) within the budgets of Ada-KV (arXiv 2407.11550).

Ada-KV divides a layer's budget among its heads by the scores of its base. Half of a head's entries are then its best by
these scores, the others those with the largest scores times the norm of projected values.

Differences from the reference: those of `adakv.py` and `criticalkv.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvsieve.methods.adakv import AdaKV, AdaKVParameters
from kvsieve.planning import defaults
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method


@register_method(
    "criticaladakv", title="CriticalAdaKV", paper="arXiv 2502.03805", phase="end of prompt", derive=defaults.pooling
)
@dataclass(frozen=True, kw_only=True)
class CriticalAdaKVParameters(AdaKVParameters):
    """Divide the budget among heads as Ada-KV, and weight half of a head's entries by value norm as CriticalKV."""

    def plan(self) -> Plan:
        evictor = super().plan().evict
        assert isinstance(evictor, AdaKV)
        return Plan(evict=replace(evictor, critical=True))
