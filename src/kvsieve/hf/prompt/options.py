"""Options of a prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.prompt.constraints import PromptConstraints
from kvsieve.planning.roles import ProbingEvictor
from kvsieve.types import LayerContext, Selection

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ReadOptions:
    """Options of a prefill.

    Attributes:
        chunk: tokens per forward pass, None for all at once.
        new_tokens: tokens expected after it, 0 if unknown.
        pad_token_id: padding token if there is no mask, or None.
        progress: called with (tokens done, total tokens).
        leave_last: leave the last chunk to a later pass, as ``model.generate`` does.
        constraints: of the caller on the plan.
        window: least number of queries in the last chunk, besides the plan's observation window.
        on_layer: called in each layer of each pass; see PassRequest.
        begun: returns a cache with the beginning of the prompt prefilled in full; for a first pass that only chooses
            tokens. None without one.
        probed: results of this prompt's probings, shared between evictors; filled here.
        together: returns the number of chunks for the next pass, if results do not depend on it; None for one, and with
            `on_layer`.
        goes_on: the cache itself has the beginning of the prompt, prefilled in full.
    """

    chunk: int | None = None
    new_tokens: int = 0
    pad_token_id: int | None = None
    progress: Progress | None = None
    leave_last: bool = True
    constraints: PromptConstraints = field(default_factory=PromptConstraints)
    window: int = 0
    on_layer: Callable[[LayerContext], Selection | None] | None = None
    begun: Callable[[], SieveCache] | None = None
    probed: dict[ProbingEvictor, dict[int, dict[str, Any]]] | None = None
    together: Callable[[], int] | None = None
    goes_on: bool = False


def shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Return a progress callback for a part of a prompt after `before` tokens, of `total` tokens."""
    return None if progress is None else lambda done, _: progress(before + done, total)
