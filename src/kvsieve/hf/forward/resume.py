"""Reuse of the conversation's cache in a pass for which generate has dropped it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from kvsieve.hf.cache.cache import SieveCache

# Makes a cache fit for a pass over ids [B, N] with this mask, and returns it; None for passes over other prompts.
Resume = Callable[[Tensor, Tensor | None], SieveCache | None]
_RESUME: ContextVar[Resume | None] = ContextVar("kvsieve_resume", default=None)


@contextlib.contextmanager
def resuming(resume: Resume) -> Iterator[None]:
    """Let passes without a cache get it from `resume`, by their ids [B, N] and mask.

    Some models' generate drops the cache if rotary tables change with the length, and prefills everything in one pass.
    """
    token = _RESUME.set(resume)
    try:
        yield
    finally:
        _RESUME.reset(token)


def resumed(kwargs: dict[str, Any], outer: Mapping[str, Any]) -> SieveCache | None:
    """Return the cache for a pass over a whole conversation, and leave the rest of it in kwargs."""
    resume = _RESUME.get()
    ids = kwargs.get("input_ids", outer.get("input_ids"))
    if resume is None or ids is None:
        return None
    # Passes of the driver's own come with a cache.
    cache = resume(ids, kwargs.get("attention_mask", outer.get("attention_mask")))
    if cache is not None and cache.num_seen:
        for name in ("input_ids", "inputs_embeds", "position_ids"):
            value = kwargs.get(name)
            if value is not None:
                at = value.ndim - 1 - (name == "inputs_embeds")
                kwargs[name] = value.narrow(at, cache.num_seen, ids.shape[1] - cache.num_seen)
    return cache
