"""Log-likelihoods of continuations after a context prefilled under a plan."""

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
    """Scored continuations of one context, and the plan's effect on the context.

    Attributes:
        scores: per continuation, the sum of its tokens' log-probabilities, and True if each token was the most
            probable.
        applied: every role of the plan acted.
        notes: deviations from the request.
        prompt_tokens: tokens of the context.
        kv_share: entries stored at the end of the context, as a share of full KV.
    """

    scores: list[tuple[float, bool]]
    applied: bool
    notes: list[str]
    prompt_tokens: int
    kv_share: float


def split(context: Sequence[int], continuation: Sequence[int], most: int) -> tuple[Tokens, Tokens]:
    """Cut a context on the left so that at most `most` tokens are fed; the continuation's last token never is.

    Raises InputError for a continuation without tokens, or with more than `most`.
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
    """Prefill a context under a plan, as `generate` does, and score continuations, each on a copy of the cache.

    Their tokens are fed as those of an answer: each attends as if it had been generated.

    Args:
        model: of transformers.
        plan: fully specified.
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
            # The rotary tables change: generate prefills everything again.
            rest = score(model, plan, context + tokens[:count], [tokens[count:]], chunk=chunk, dtype=dtype).scores[0]
            scores[at] = (scores[at][0] + rest[0], scores[at][1] and rest[1])
    # Readers record their reads in the copy.
    applied, notes = what_ran(plan, cache if plan.read is None else copy)
    share = sum(kept) / max(sum(whole), 1)
    return ScoredContext(scores, applied, notes, cache.turn.record.prompt_tokens, share)


def _score(logits: Tensor, tokens: Tokens, dtype: torch.dtype | None) -> tuple[float, bool]:
    """Return the score of tokens by logits [T, V] before each of them."""
    wanted = torch.tensor(tokens, device=logits.device)
    found = logits.log_softmax(-1, dtype=dtype)
    return float(found.gather(-1, wanted[:, None]).sum()), bool((found.argmax(-1) == wanted).all())


def changes_first_token(plan: Plan) -> bool:
    """Return True if the first token after a prompt is computed from only a part of it."""
    return plan.propagate is not None or plan.shortens_prompt or plan.when.chunks


def by_context(pairs: Sequence[tuple[Tokens, Tokens]]) -> Iterator[tuple[Tokens, list[int]]]:
    """Yield each context, longest first, with the indices of its pairs."""
    groups: dict[Tokens, list[int]] = {}
    for index, (context, _) in enumerate(pairs):
        groups.setdefault(context, []).append(index)
    yield from sorted(groups.items(), key=lambda item: -len(item[0]))
