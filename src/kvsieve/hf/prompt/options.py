"""Options of reading a prompt."""

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
    """Options of reading a prompt.

    Attributes:
        chunk: tokens per forward pass, None for all at once.
        new_tokens: tokens expected after it, 0 if nobody said.
        pad_token_id: token that is padding where there is no mask; None where none is.
        progress: called with (tokens read, tokens in all).
        leave_last: leave the last chunk to whoever goes on, as ``model.generate`` does.
        constraints: what the caller asks of the plan.
        window: queries that the last chunk holds at least, beside those that the plan looks at.
        on_layer: called in each layer of each pass; see PassRequest.
        begun: makes a cache that has read the beginning of the prompt, in full, and goes on with it; for a first pass
            over a prompt that only chooses tokens. None where nothing was read.
        probed: what probings of this prompt have left in the layers' states, which others go by; filled here.
        together: tells how many chunks the next pass may take, where results do not depend on it; None for one,
            and with `on_layer`.
        goes_on: the cache itself has read the beginning of the prompt, in full.
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
    """Tell of a part of a prompt as one that `before` tokens precede, of `total` in all."""
    return None if progress is None else lambda done, _: progress(before + done, total)
