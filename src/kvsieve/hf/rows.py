"""The next token of several conversations in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.compat import CACHE
from kvsieve.hf.forward.passes import open_rows
from kvsieve.hf.forward.rows import joins
from kvsieve.hf.runtime import AttachedModel


def feed_rows(model: AttachedModel, caches: Sequence[SieveCache], ids: Tensor) -> Tensor:
    """Run one pass over the next token of several conversations, each under its own cache's plan.

    Linear layers take all rows together; every row attends and is reduced as it would be alone.

    Args:
        model: the attached model.
        caches: of this model and one row each, whose prompts are complete; `joins` (forward/rows.py) says which.
        ids: int64 [B], the next token of each.

    Returns:
        [B, V], the logits.
    """
    ids = ids.to(model.model.device)[:, None]
    for cache in caches:
        if cache.owner.decoder() is not model.decoder or cache.turn.reading or not joins(cache):
            raise CacheStateError("a row is a cache of this model whose prompt is complete, and of plain class")
    call: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": None,
        "position_ids": torch.tensor([[cache.num_seen] for cache in caches], device=ids.device),
        "use_cache": True,
    }
    model.check_call(call)
    session = open_rows(model.context, caches, ids)
    out = model.run_pass(session, {**call, CACHE: session.together}, 1)
    logits: Tensor = out.logits[:, -1]
    return logits
