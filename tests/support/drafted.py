"""Greedy answers of one conversation, alone and with a drafter, by passes of an attached model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvsieve.hf.drafts.drafter import Drafter, RowDrafts
from kvsieve.hf.drafts.length import DraftLength
from kvsieve.hf.forward.request import PassRequest


def begun(sieve: Any, ids: torch.Tensor, new: int = 32) -> tuple[Any, list[int]]:
    """Return a cache with a prompt, int64 [1, N], and the conversation with the answer's first token, not yet fed."""
    cache = sieve.new_cache()
    cache.begin_turn(ids.shape[1], new)
    logits = sieve.feed(cache, ids, None, PassRequest(phase="prefill"), logits=1).logits
    return cache, [*ids[0].tolist(), int(logits[0, -1].argmax())]


def alone(sieve: Any, ids: torch.Tensor, new: int) -> tuple[Any, list[int]]:
    """Return the cache and the conversation after `new` tokens of a greedy answer; the last one is not fed."""
    cache, tokens = begun(sieve, ids)
    while len(tokens) < ids.shape[1] + new:
        logits = sieve.feed(cache, torch.tensor([tokens[-1:]]), None, PassRequest(phase="decode"), logits=1).logits
        tokens.append(int(logits[0, -1].argmax()))
    return cache, tokens


def drafted(
    sieve: Any, ids: torch.Tensor, new: int, drafter: Callable[[Any], Drafter], most: int = 3
) -> tuple[Any, list[int], RowDrafts]:
    """Return what `alone` does, and the drafts, with a drafter for the cache."""
    cache, tokens = begun(sieve, ids)
    row = RowDrafts(drafter(cache), DraftLength(most, 0.01, adapt=False), tokens)
    end = ids.shape[1] + new
    while len(tokens) < end:
        guesses = row.next(end - len(tokens) - 1)
        fed = torch.tensor([[tokens[-1], *guesses]])
        result = sieve.feed(cache, fed, None, PassRequest(tentative=True), logits=fed.shape[1])
        own = result.logits[0].argmax(-1).tolist()
        right = next((at for at, guess in enumerate(guesses) if guess != own[at]), len(guesses))
        result.transaction.accept(right + 1)
        tokens += own[: right + 1]
        row.took(own[: right + 1])
    row.close()
    return cache, tokens, row
