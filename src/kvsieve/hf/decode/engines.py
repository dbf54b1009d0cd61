"""Names of the decode engines."""

from __future__ import annotations

from kvsieve.errors import PlanError

ENGINES = ("auto", "eager", "fused", "graph")
_GONE = {
    "packed": "products of few tokens are as fast with weights as they lie. Leave it out, or say 'fused'",
    "compile": "it was slower than 'fused' on CPUs, and 'graph' serves CUDA. Leave it out",
}


def check_engine(name: str, option: str) -> None:
    """Raise PlanError for an engine that does not exist. option: what it was given as, such as "--decode"."""
    if name in _GONE:
        raise PlanError(f"{option} {name!r} is gone: {_GONE[name]}")
    if name not in ENGINES:
        raise PlanError(f"{option} must be one of {', '.join(ENGINES)}, got {name!r}")
