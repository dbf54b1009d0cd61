"""Parameters of methods where neither the caller nor a profile of the model gives them.

The papers' defaults were found on models of 7 to 8B. These follow from the model's depth and from how its tokenizer
splits digits, and were chosen by what a small and a larger model answer (benchmarks/defaults.py, docs/calibrate.md).
"""

from __future__ import annotations

from typing import Any

from kvsieve.errors import InputError, short
from kvsieve.profiles import Fingerprint

# Tokens of an answer such as a number of seven digits with some room: what pooling should keep in one piece.
_PIECE = 21
_DIGITS = "7305816294"


def digits_per_token(tokenizer: Any = None) -> int:
    """Digits of a number that a tokenizer puts into one token, rounded: 1 where it splits them one by one.

    tokenizer: of transformers; None takes 1, so that no kernel is too narrow. Raises InputError
    for what is no tokenizer.
    """
    if tokenizer is None:
        return 1
    if not callable(tokenizer):
        raise InputError(f"tokenizer= takes a tokenizer of transformers, got {short(tokenizer)}")
    once, thrice = (len(tokenizer(_DIGITS * times, add_special_tokens=False)["input_ids"]) for times in (1, 3))
    return max(1, round(2 * len(_DIGITS) / max(thrice - once, 1)))


def pooling(model: Fingerprint, digits: int) -> dict[str, Any]:
    """Window and kernel of methods that keep what a window of queries attends to."""
    return {"window": 16, "kernel": "auto" if digits == 1 else _odd(_PIECE / digits)}


def fastkv(model: Fingerprint, digits: int) -> dict[str, Any]:
    """The pooling, and the layer after which tokens are dropped."""
    return {"tsp_layer": settled_layer(model), **pooling(model, digits)}


def asl(model: Fingerprint, digits: int) -> dict[str, Any]:
    """The pooling, and the first layer that may select: it does as soon as ranks move less than there."""
    layer = settled_layer(model)
    # Of a shallow model no layer has enough others before it.
    return {**({"first": layer, "tau": 1.0} if layer >= 7 else {}), **pooling(model, digits)}


def gemfilter(model: Fingerprint, digits: int) -> dict[str, Any]:
    """The filter layer and the pooling of its scores."""
    return {"layer": settled_layer(model), "kernel": pooling(model, digits)["kernel"]}


def settled_layer(model: Fingerprint) -> int:
    """The layer after which dropping tokens changes little; half the depth is enough for large models only."""
    return max(min(model.layers * 7 // 10, model.layers - 2), 0)


def _odd(width: float) -> int:
    """The nearest odd number of at least 7, the papers' own width."""
    return max(7, 2 * round((width - 1) / 2) + 1)
