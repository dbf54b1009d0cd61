"""Full KV: no eviction, dense attention. The reference of every ratio."""

from __future__ import annotations

from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method


@register_method("full", title="Full KV", paper="the model itself", phase="never")
def full() -> Plan:
    """Keep all KV entries: an empty plan."""
    return Plan()
