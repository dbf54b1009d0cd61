"""Log-likelihoods of continuations after a context that was read under a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import InputError
from kvsieve.hf.attach import attach
from kvsieve.hf.generate.acted import entries_after_prompt, what_ran
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.reread import tokens_before_border
from kvsieve.planning.plans import Plan
from kvsieve.shared.prompt import after_prompt, answer_logits, read_alone

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class ScoredContext:
    """Continuations of one context, scored, and what the plan did to the context.

    Attributes:
        scores: of each continuation, the sum of its tokens' log-probabilities, and whether each of them was the most
            probable one.
        applied: every role of the plan acted.
        notes: what did not go as asked.
        prompt_tokens: tokens of the context.
        kv_share: entries stored once the context was complete, of those under full KV.
    """

    scores: list[tuple[float, bool]]
    applied: bool
    notes: list[str]
    prompt_tokens: int
    kv_share: float


def split(context: Sequence[int], continuation: Sequence[int], most: int) -> tuple[Tokens, Tokens]:
    """Cut a context on the left so that at most `most` tokens are fed; the continuation's last token never is.

    Raises InputError for a continuation that has no tokens, or more than `most`.
    """
    if not 0 < len(continuation) <= most:
        raise InputError(
            f"a continuation must have 1 to {most} tokens (the model's longest input), got {len(continuation)}"
        )
    room = most + 1 - len(continuation)
    return tuple(context[-room:]), tuple(continuation)


def score(
    model: Any,
    plan: Plan,
    context: Tokens,
    continuations: Sequence[Tokens],
    *,
    chunk: int | None = None,
    dtype: torch.dtype | None = None,
) -> ScoredContext:
    """Read a context once under a plan, as `generate` does, and score continuations, each on a copy of the cache.

    Their tokens are fed as those of an answer: each reads what it would have read had it been generated.

    Args:
        model: of transformers.
        plan: with nothing left open.
        context: token ids, at least one.
        continuations: token ids, at least one each.
        chunk: context tokens per forward pass, None for all at once.
        dtype: of the softmax; None for that of the logits.
    """
    options = ReadOptions(chunk, new_tokens=max(map(len, continuations)))
    cache, last, _ = read_alone(model, plan, torch.tensor([context]), options=options)
    kept, whole = entries_after_prompt(cache)
    scores = []
    counts = []
    with attach(model, after_prompt(plan)) as sieve, torch.no_grad():
        for tokens in continuations:
            logits = last[:, None]
            copy = sieve.adopt(cache.fork())
            count = 1 + tokens_before_border(sieve, copy, len(tokens) - 1)
            if count > 1:
                fed = torch.tensor([tokens[: count - 1]], device=last.device)
                logits = torch.cat([logits, answer_logits(sieve, copy, fed)], 1)
            scores.append(_score(logits[0], tokens[:count], dtype))
            counts.append(count)
    for at, (tokens, count) in enumerate(zip(continuations, counts, strict=True)):
        if count < len(tokens):
            # The rotary tables change: generate reads everything so far again.
            rest = score(model, plan, context + tokens[:count], [tokens[count:]], chunk=chunk, dtype=dtype).scores[0]
            scores[at] = (scores[at][0] + rest[0], scores[at][1] and rest[1])
    # Readers note what they read in the copy that they read.
    applied, notes = what_ran(plan, cache if plan.read is None else copy)
    share = sum(kept) / max(sum(whole), 1)
    return ScoredContext(scores, applied, notes, cache.turn.record.prompt_tokens, share)


def _score(logits: Tensor, tokens: Tokens, dtype: torch.dtype | None) -> tuple[float, bool]:
    """Score tokens by logits [T, V] before each of them."""
    wanted = torch.tensor(tokens, device=logits.device)
    found = logits.log_softmax(-1, dtype=dtype)
    return float(found.gather(-1, wanted[:, None]).sum()), bool((found.argmax(-1) == wanted).all())


def changes_first_token(plan: Plan) -> bool:
    """Tell whether the first token after a prompt is computed from less than the whole of it."""
    drops = plan.evict is not None and plan.evict.when.chunks
    return plan.propagate is not None or plan.shortens_prompt or drops


def by_context(pairs: Sequence[tuple[Tokens, Tokens]]) -> Iterator[tuple[Tokens, list[int]]]:
    """Yield each context, the longest first, with the indices of the pairs that have it."""
    groups: dict[Tokens, list[int]] = {}
    for index, (context, _) in enumerate(pairs):
        groups.setdefault(context, []).append(index)
    yield from sorted(groups.items(), key=lambda item: -len(item[0]))
