"""Models that add positions to hidden states, where a change of position cannot reach them."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.passes import open_session
from kvsieve.hf.forward.request import PassRequest, StopForward
from kvsieve.hf.model.facts import variation
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.types import LayerContext

_KNOWN: weakref.WeakKeyDictionary[AttachedModel, bool] = weakref.WeakKeyDictionary()
# Tokens of the trial.
_SIZE = 9


def why_not_moved(model: AttachedModel) -> str | None:
    """Return a clause why entries of a model without recurrent layers cannot move to other columns, or None."""
    if model not in _KNOWN:
        _KNOWN[model] = _embeds_positions(model)
    return "the model adds positions to hidden states, where they cannot change" if _KNOWN[model] else None


def _embeds_positions(model: AttachedModel) -> bool:
    """Return True if the first layer's value of a token differs between positions, found by a trial."""
    found: list[Tensor] = []

    def stop(ctx: LayerContext) -> None:
        found.append(ctx.values)
        raise StopForward

    positions = torch.arange(_SIZE, device=model.model.device)[None]
    cache = model.new_cache()
    call = {"input_ids": torch.ones_like(positions), "position_ids": positions, CACHE: cache, "use_cache": True}
    request = PassRequest(plan=Plan(), phase="prefill", on_layer=stop)
    model.run_pass(open_session(model.context, Plan(), cache, call, request), call, 0)
    return variation(found[0].float()) > 1e-2
