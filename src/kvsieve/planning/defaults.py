"""Defaults of methods' parameters by model, below the caller's and a profile's.

PAPER has the values of each paper, which ``paper=True`` selects; MODELS and LAYERS the papers' models, which get those
values by default. Other models get values by their depth and their tokenizer's splitting of digits, chosen by the
answers of a small and a larger model (docs/calibrate.md).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvsieve.errors import InputError, short
from kvsieve.planning.profiles import Fingerprint

# Tokens of an answer such as a seven-digit number, and a margin, that pooling should keep together.
_PIECE = 21
_DIGITS = "7305816294"

# Method -> parameters of its paper; "code" means the authors' published code.
PAPER: dict[str, dict[str, Any]] = {
    # LongBench runs of the code: w32, k7, maxpool.
    "snapkv": {"window": 32, "kernel": 7, "pooling": "max"},
    # Code: floor 0.2, window 32, kernel 7, maxpool.
    "adakv": {"alpha": 0.2, "window": 32, "kernel": 7, "pooling": "max"},
    # Section 5 and code: beta 20, window 8, kernel 7, maxpool.
    "pyramidkv": {"beta": 20, "window": 8, "kernel": 7, "pooling": "max"},
    # Code: window 32, kernel 5, avgpool, gamma 200.
    "cake": {"gamma": 200.0, "window": 32, "kernel": 5, "pooling": "avg"},
    # Section 5.1: window 8, kernel 7, TSP rate 20%; code: maxpool.
    "fastkv": {"tsp_rate": 0.2, "window": 8, "kernel": 7, "pooling": "max"},
    # Sections 5.1 and 5.5, appendix C.2: L_obs 8, tau 0.3, average pooling, window 32, kernel 7.
    "asl": {"tau": 0.3, "observed": 8, "window": 32, "kernel": 7, "pooling": "avg"},
    # Notes on the paper; see methods/claa.py.
    "claa": {"joined": 4, "window": 8, "kernel": 7, "skip_layers": 4},
    # Algorithm 1; no token is forced.
    "gemfilter": {"kernel": 5, "keep_last": 0},
    # Section 3.2 (lag 128) and 3.3 (16 sinks).
    "lagkv": {"sinks": 16, "lag": 128},
    # Half of the budget for recent entries, in every step.
    "h2o": {"recent": 0.5, "every": 1},
    # Section 3.2: kernel 63; appendix A.3: window 32, in conversations 128. Algorithm 1 forces no entry.
    "rocketkv": {"window": 32, "kernel": 63, "pooling": "max", "newest": False},
    "rocketkv-mt": {"window": 128, "kernel": 63, "pooling": "max", "newest": False},
    "hsa": {"newest": False},
    "exacttopk": {"newest": False, "per_group": False},
    # Pages of 16, first two layers dense, one set per query head.
    "quest": {"page": 16, "per_query_head": True, "skip_layers": 2},
    # One set per query head, the mean of values blended in, no entry forced.
    "sparq": {"per_query_head": True, "mean_value": True, "newest": False},
    # Algorithm 1: a quarter of the entries by a quarter of the components, in each query head.
    "loki": {"part": 0.25, "per_query_head": True, "newest": False},
    # Section 3 and code: 16 sinks, a set per query head, first two layers dense.
    "clusterkv": {"sinks": 16, "per_query_head": True, "skip_layers": 2},
    # Code, decode only: no entry is forced.
    "kascade": {"newest": False},
}

# Models of the papers, by shape; their vocabulary identifies the tokenizer.
MODELS = {
    "Llama-3.1-8B": Fingerprint("llama", 32, 32, 8, 128, 4096, 128256),
    "Qwen2.5-7B": Fingerprint("qwen2", 28, 28, 4, 128, 3584, 152064),
    "Ministral-8B": Fingerprint("mistral", 36, 32, 8, 128, 4096, 131072),
    "Mistral-Nemo-12B": Fingerprint("mistral", 40, 32, 8, 128, 5120, 131072),
    "Mistral-7B-v0.2": Fingerprint("mistral", 32, 32, 8, 128, 4096, 32000),
    "LongChat-7B-v1.5": Fingerprint("llama", 32, 32, 32, 128, 4096, 32000),
    "Phi-3.5-mini": Fingerprint("phi3", 32, 32, 32, 96, 3072, 32064),
}

# Method -> parameter, and the layer by model that its paper, or one that compared with it, chose.
LAYERS: dict[str, tuple[str, dict[str, int]]] = {
    # FastKV 5.1, its code (Nemo), ASL C.2 (Qwen).
    "fastkv": ("tsp_layer", {"Llama-3.1-8B": 15, "Ministral-8B": 17, "Mistral-Nemo-12B": 19, "Qwen2.5-7B": 14}),
    "claa": ("tsp_layer", {"Llama-3.1-8B": 15}),
    # FastKV 5.1, ASL C.2, GemFilter's code (Nemo, Phi).
    "gemfilter": (
        "layer",
        {"Llama-3.1-8B": 13, "Ministral-8B": 17, "Mistral-Nemo-12B": 19, "Qwen2.5-7B": 14, "Phi-3.5-mini": 19},
    ),
    # ASL 5.1; D.2 has a third of the depth for any model.
    "asl": ("first", {name: shape.layers // 3 for name, shape in MODELS.items()}),
}

# Parameters that depend on the model; the others of PAPER apply with paper=True only.
_OF_MODEL = frozenset({"tau", "observed", "window", "kernel", "pooling"})


def paper_model(model: Fingerprint) -> str | None:
    """Return the name of the papers' model with this shape, or None."""
    # transformers has a separate type for Ministral; checkpoints have either.
    shape = dataclasses.replace(model, model_type={"ministral": "mistral"}.get(model.model_type, model.model_type))
    return next((name for name, known in MODELS.items() if known == shape), None)


def published(method: str, model: Fingerprint) -> dict[str, Any]:
    """Return a method's model-dependent parameters as published for this model; empty for others."""
    name = paper_model(model)
    parameter, layers = LAYERS.get(method, ("", None))
    if name is None or method not in PAPER or (layers is not None and name not in layers):
        return {}
    layer = {} if layers is None else {parameter: layers[name]}
    return {**layer, **{key: value for key, value in PAPER[method].items() if key in _OF_MODEL}}


def layer_at_depth(method: str, layers: int, otherwise: int) -> int:
    """Return the layer that a method's paper chose on a model of `layers` layers, else `otherwise`."""
    known = ((MODELS[name].layers, layer) for name, layer in LAYERS[method][1].items())
    return next((layer for depth, layer in known if depth == layers), otherwise)


def digits_per_token(tokenizer: Any = None) -> int:
    """Return the digits of a number per token, rounded; 1 if the tokenizer splits them one by one.

    tokenizer: of transformers; None returns 1, so that no kernel is too narrow. Raises InputError for other objects.
    """
    if tokenizer is None:
        return 1
    if not callable(tokenizer):
        raise InputError(f"tokenizer= takes a tokenizer of transformers, got {short(tokenizer)}")
    once, thrice = (len(tokenizer(_DIGITS * times, add_special_tokens=False)["input_ids"]) for times in (1, 3))
    return max(1, round(2 * len(_DIGITS) / max(thrice - once, 1)))


def pooling(model: Fingerprint, digits: int) -> dict[str, Any]:
    """Return window and kernel for methods that keep the entries attended to by a window of queries."""
    return {"window": 16, "kernel": "auto" if digits == 1 else _odd(_PIECE / digits)}


def fastkv(model: Fingerprint, digits: int) -> dict[str, Any]:
    """Return the pooling, and the layer after which tokens are dropped."""
    return {"tsp_layer": settled_layer(model), **pooling(model, digits)}


def asl(model: Fingerprint, digits: int) -> dict[str, Any]:
    """Return the pooling, and the first layer that may select, with the variance of ranks there as threshold."""
    layer = settled_layer(model)
    # In a shallow model no layer has enough layers before it.
    return {**({"first": layer, "tau": 1.0} if layer >= 7 else {}), **pooling(model, digits)}


def gemfilter(model: Fingerprint, digits: int) -> dict[str, Any]:
    """Return the filter layer and the pooling of its scores."""
    return {"layer": settled_layer(model), "kernel": pooling(model, digits)["kernel"]}


def settled_layer(model: Fingerprint) -> int:
    """Return the layer after which dropping tokens changes little; half the depth suffices for large models only."""
    return max(min(model.layers * 7 // 10, model.layers - 2), 0)


def _odd(width: float) -> int:
    """Return the nearest odd number of at least 7, the papers' width."""
    return max(7, 2 * round((width - 1) / 2) + 1)
