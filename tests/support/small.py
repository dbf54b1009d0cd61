"""Every method's plan at a size that reduces prompts of a few tokens, what a cache then stores, and a recorder."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvsieve
from kvsieve.hf.decode import engine as engines
from kvsieve.planning.named import plan_without_floor
from kvsieve.planning.profiles import Fingerprint, Profile
from layers import golden
from tiny_models import build

# What makes methods reduce prompts as short as these.
SMALL = {
    "window": 4,
    "recent": 4,
    "sinks": 2,
    "lag": 8,
    "question_tokens": 5,
    "tsp_layer": 1,
    "observed": 2,
    "first": 1,
}
# Likewise of those that read prompts sparsely.
BLOCKS = {"block": 4, "queries": 8, "least": 16, "local": 4}
PARAMETERS = {
    "a-shape": BLOCKS,
    "asl": {"tau": 5.0, "budget": 80},
    "attentionmatching": {"repeat_ids": (), "answer_ids": ()},
    "chunkkv": {"chunk_length": 4},
    # Its own default, the first four layers, is all that a tiny model has.
    "claa": {"skip_layers": 0},
    "compactattention": {**BLOCKS, "base": "minference", "chunk_length": 16},
    "corm": {"queries": 6},
    "critiprefill": {**BLOCKS, "critical": 8, "skip_layers": 0},
    "entropychunkkv": {"chunk_length": 6, "spiky_length": 2},
    "fastgen": {"recovery": 0.5, "special_ids": (2, 3, 4), "punctuation_ids": (5, 6, 7, 8)},
    "d2o": {"recent": 0.5},
    "finch": {"chunk_length": 32},
    "flashprefill": BLOCKS,
    "flexprefill": BLOCKS,
    "gemfilter": {"layer": 1},
    "h2o": {"recent": 0.7},
    "infllm": {"local": 4, "block": 4},
    "kvcompose": {"chunk_length": 24},
    "kvmerger": {"recent": 0.3},
    "kvsquared": {"chunk_length": 32},
    "kvzip": {"chunk_length": 64, "repeat_ids": (), "go_on_ids": (), "answer_ids": ()},
    "minference": BLOCKS,
    # Its own filters leave nothing to share in a tiny model.
    "omnikv": {"share": "1", "wait": 0},
    "pyramidinfer": {"min_context": 8, "rate": 0.3, "recent": 0.1},
    "rerotation": {"base": "knorm", "chunk_length": 32},
    "roco": {"recent": 0.3, "newest": 2},
    "sagekv": {"recent": 0.5},
    "scope": {"base": "knorm", "answer": "40%"},
    # Every layer of a tiny model is lazy enough.
    "simlayerkv": {"threshold": 0.3},
    # More is read than the budget lets be stored, so that there is something to evict.
    "specprefill": {"keep": "80%", "chunk_length": 4, "keep_last": 4, "smooth": 3, "lookahead": 3},
    "staged": {"early_layer": 0},
    # So low that the budget alone decides.
    "threshold": {"base": "knorm", "threshold": -1e9},
    "vase": {"large": 3},
    "lookahead": {"lookahead": 3},
    "windowkv": {"length": 4, "share": 2},
    "xattention": {**BLOCKS, "stride": 2, "threshold": 0.6},
}


# Methods that act while decoding too, under ``plan_of(name, model, every=3)``.
ACTING = [
    name
    for name in kvsieve.list_methods()
    if name in ("lagkv", "scope")
    or ("every" in kvsieve.method_info(name).parameters and name not in ("lookahead", "mixed"))
]


def fill(model, seed=0):
    """Weights of a tiny model that depend on no release of transformers."""
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=make, dtype=torch.float64) * 0.2)
    return model


@functools.cache
def draft():
    """A tiny model of two layers that drafts for the others, whose tokens it shares."""
    return fill(build("llama", dtype=torch.float64, num_hidden_layers=2), seed=7)


def longrope_factors(border):
    """Rotary factors, as Phi-3's, that change behind so many tokens."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": border,
        "short_factor": [1.0] * 8,
        "long_factor": [float(1 + i) for i in range(8)],
    }


def plan_of(name, model, **given):
    """A method's plan at 40% of the prompt, with parameters fit for a tiny model; `given` where it takes them."""
    info = kvsieve.method_info(name)
    chosen = {**info.example, "budget": "40%", **SMALL, **PARAMETERS.get(name, {}), **given}
    if name == "per-layer":
        chosen["shares"] = "1/0.5/1.5/1"
    if name == "specprefill":
        chosen["draft"] = draft()
    if info.part is not None:
        config = model.config
        shape = torch.Size([config.num_hidden_layers, config.num_key_value_heads])
        heads = golden(shape, 3).tolist()
        filters = golden((*shape, config.hidden_size // config.num_attention_heads), 4).tolist()
        budgets = golden((*shape, 9), 5).abs().sort(-1).values.tolist()
        chosen["profile"] = Profile(
            Fingerprint.of(model), heads=heads, q_filters=filters, head_budgets=budgets, entropies=heads
        )
    made = plan_without_floor(name, **{key: value for key, value in chosen.items() if key in info.parameters})
    # What is not given stays at the method's own default.
    return dataclasses.replace(made, unset=None)


def stored(cache, padding=(0,)):
    """Per row, layer and head: numbers of the true tokens that are stored."""
    out = [[] for _ in padding]
    for number, layer in cache.sieve_layers.items():
        store = layer.store
        index = store.index.long()
        real = index >= 0 if store.valid is None else (index >= 0) & store.valid
        if cache.conversation.short_prompt is not None:
            index = cache.conversation.short_prompt.as_given(index, number)
        for row, pad in enumerate(padding):
            out[row].append([(index[row, h][real[row, h]] - pad).tolist() for h in range(index.shape[1])])
    return out


class NothingWaits(TorchDispatchMode):
    """Refuses operations that wait for the device, or whose shapes depend on data: a CUDA graph cannot have them."""

    _WAITING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        places = arguments[1] if name.startswith("index") and isinstance(arguments[1], (list, tuple)) else ()
        assert name not in self._WAITING, name
        assert not any(place is not None and place.dtype == torch.bool for place in places), name
        return function(*arguments, **(options or {}))


@contextlib.contextmanager
def recorder_stand_in(engine="graph", watched=contextlib.nullcontext):
    """Let this engine record a pass by running it once, as a warm-up does, and then run it whenever it is asked to.

    watched: entered around each run.
    """

    def record(run):
        def watch():
            with watched():
                return run()

        watch()
        return watch

    before = engines.RECORDERS[engine]
    engines.RECORDERS[engine] = lambda device: record
    try:
        yield
    finally:
        engines.RECORDERS[engine] = before
