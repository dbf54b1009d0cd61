"""Parameters of methods, from the measured parts of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsieve.methods import SnapKV
from kvsieve.planning.registry import list_methods, method_info


def method_parameters(measured: Mapping[str, Any], pooled: SnapKV, tsp_rate: Any) -> dict[str, dict[str, Any]]:
    """Return the parameters found for each method; the pooling applies to all that pool a window's attention.

    Args:
        measured: part -> its numbers.
        pooled: has the window and the pooling.
        tsp_rate: tokens propagated where layers were compared.
    """
    chosen = {"window": pooled.window, "kernel": pooled.kernel, "pooling": pooled.pooling}
    found: dict[str, dict[str, Any]] = {}
    if "pooling" in measured:
        # A method with its own window, such as RocketKV's first stage, keeps it.
        takers = (method_info(name) for name in list_methods())
        found = {
            info.name: dict(chosen)
            for info in takers
            if info.derive is not None and chosen.keys() <= info.parameters.keys()
        }
    if "tsp" in measured:
        rate = str(tsp_rate)
        for name in ("fastkv", "claa", "staged"):
            found[name] = {"tsp_layer": measured["tsp"]["layer"], "tsp_rate": rate, **chosen}
    if "asl" in measured:
        found["asl"] = {**{name: measured["asl"][name] for name in ("first", "tau", "observed")}, **chosen}
    if "anchors" in measured:
        anchors = measured["anchors"]
        found["kascade"] = {"share": "/".join(map(str, anchors["layers"])), "anchor_heads": anchors["heads"]}
    return found
