"""Lengths that budgets count while decoding, and evictors that keep the prompt's entries meanwhile."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvsieve.hf.cache.records import Conversation
from kvsieve.planning.roles import Evictor
from kvsieve.types import LayerContext, Step


def counted_lengths(evictor: Evictor, step: Step, conversation: Conversation) -> tuple[int, ...]:
    """Return the tokens of each row by which a share of the budget counts."""
    prompt = step.phase == "prefill"
    # While decoding, a share stays that of the prompt unless it grows: otherwise nothing would bound the memory.
    lengths = step.lengths if prompt else conversation.prompt_lengths
    if conversation.short_prompt is not None:
        lengths = conversation.short_prompt.lengths
    if prompt or not evictor.grows:
        return lengths
    return tuple(map(sum, zip(lengths, _generated(step, conversation.prompt_lengths), strict=True)))


def keep_prompt(
    evictor: Evictor, ctx: LayerContext, counts: tuple[int, ...], prompt_lengths: tuple[int, ...]
) -> tuple[LayerContext, tuple[int, ...]]:
    """Protect the entries of everything before the answer, while an evictor with `keeps_prompt` decodes.

    Args:
        evictor: any.
        ctx: the layer.
        counts: entries per row, of prompt and answer together.
        prompt_lengths: true tokens of each row when the turn's prompt was complete.

    Returns:
        The context, and the entries per row: those stored of the prompt, and the answer's.
    """
    if ctx.step.phase == "prefill" or not evictor.keeps_prompt:
        return ctx, counts
    start = _answer_start(ctx.step, prompt_lengths).to(ctx.index.device, non_blocking=True)
    prompt = (ctx.index >= 0) & (ctx.index < start)
    if ctx.valid is not None:
        prompt = prompt & ctx.valid
    stored = prompt.sum(-1).amax(-1).tolist()
    rows = zip(_generated(ctx.step, prompt_lengths), stored, counts, strict=True)
    counts = tuple(before + evictor.answer_entries(new, before, count) for new, before, count in rows)
    return dataclasses.replace(ctx, protected=prompt if ctx.protected is None else prompt | ctx.protected), counts


def _answer_start(step: Step, prompt_lengths: tuple[int, ...]) -> Tensor:
    """Return the column of the first token of each row's answer, int64 [B, 1, 1]."""
    if step.mask is not None:
        before = step.mask.cumsum(-1) <= torch.tensor(prompt_lengths, device=step.mask.device)[:, None]
        return before.sum(-1)[:, None, None]
    fed = step.start + step.num_new
    return torch.tensor([fed - new for new in _generated(step, prompt_lengths)])[:, None, None]


def _generated(step: Step, prompt_lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of each row's answer so far."""
    return tuple(length - prompt for length, prompt in zip(step.lengths, prompt_lengths, strict=True))
