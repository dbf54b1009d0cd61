"""Ids of the tokens that a conversation was fed, for evictors that choose by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import CacheStateError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.request import PassRequest
from kvsieve.planning.plans import Plan


def needs_ids(plan: Plan) -> bool:
    """Return True for a plan with an evictor that chooses by token ids."""
    return plan.evict is not None and "tokens" in plan.evict.traits.needs


def ids_so_far(plan: Plan, cache: SieveCache, call: Mapping[str, Any], request: PassRequest) -> Tensor | None:
    """Return the ids of all tokens up to the end of a pass, int64 [B, columns]; None unless needed.

    A driver's `on_layer` gets them where they are known.

    Args:
        plan: of the pass.
        cache: before the pass.
        call: the decoder's arguments. "token_ids" are those of a composite model, which embeds them itself.
        request: of a driver.

    Raises:
        UnsupportedOptionError: the tokens were given as embeddings.
        CacheStateError: those of earlier passes are unknown.
    """
    needed = needs_ids(plan)
    if not needed and request.on_layer is None:
        return None
    fed = call.get("token_ids") if call.get("input_ids") is None else call["input_ids"]
    start = cache.num_seen
    known = cache.conversation.ids
    if start and (known is None or known.shape[1] < start):
        known = None
    if fed is not None and (known is not None or not start):
        return fed.long() if known is None or not start else torch.cat([known[:, :start].to(fed.device), fed.long()], 1)
    if not needed:
        return None
    if fed is None:
        raise UnsupportedOptionError(
            f"{plan.name!r} chooses by token ids, and the tokens were given as embeddings: give input_ids, or use "
            "another method"
        )
    raise CacheStateError(
        f"{plan.name!r} chooses by token ids, and the cache does not know those of its {start} tokens, which were read "
        "under another plan: start with a new cache"
    )


def note_ids(cache: SieveCache, ids: Tensor) -> None:
    """Record the ids of a cache's columns, unless they are known. ids: int64 [B, num_seen or more]."""
    known = cache.conversation.ids
    start = cache.num_seen
    if start and (known is None or known.shape[1] < start):
        cache.conversation.ids = ids[:, :start]
