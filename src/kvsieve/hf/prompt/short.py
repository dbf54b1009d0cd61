"""Prompts replaced by a shorter one: tokens chosen by a first pass, or compressed chunk by chunk.

The cache has the short prompt alone, at the positions 0, 1, ... and stores (`ShortPrompt`) the caller's whole prompt,
whose columns precede the generated ones in the result.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.counts import PromptBlocks
from kvsieve.hf.cache.short_prompt import ShortPrompt
from kvsieve.hf.prompt.chunked_compression import Compressed, compress
from kvsieve.hf.prompt.chunks import read_chunks
from kvsieve.hf.prompt.options import ReadOptions, shifted
from kvsieve.hf.prompt.two_pass import choose
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.planning.protection import ProtectedTokens
from kvsieve.planning.roles import ChunkedEvictor
from kvsieve.types import Selection

_IDLE = "every token was read again: the prompt is not longer than what may be kept"


def _compressed(model: AttachedModel, cache: SieveCache, *given: Any) -> Compressed:
    """Compress a prompt in passes with columns of their own, of which rows that ended before others know nothing."""
    known = cache.conversation.ends
    cache.conversation.ends = None
    found = compress(model, cache, *given)
    cache.conversation.ends = known
    return found


def read_short_prompt(
    model: AttachedModel,
    input_ids: Tensor,
    mask: Tensor | None,
    cache: SieveCache,
    options: ReadOptions,
    *,
    protected: ProtectedTokens | None,
    question: int,
) -> None:
    """Choose tokens of a prompt and prefill them into the emptied cache; all of them if the plan must not act.

    Args:
        model: the attached model.
        input_ids: int64 [B, N], the conversation, without a question hidden from the plan.
        mask: [B, N], None without padding.
        cache: emptied here.
        options: of the prefill.
        protected: tokens that must stay.
        question: tokens of the question that follows.
    """
    ends = cache.conversation.ends
    cache.reset()
    cache.conversation.ends = None if ends is None else dataclasses.replace(ends, fed=False)
    token_index, real = _true_tokens(input_ids, mask)
    lengths = tuple(real.sum(-1).tolist())
    propagator = model.plan.propagate
    reduce = options.constraints.acts
    plan = _plan_after(model.plan)
    report: dict[str, Any] = {"idle": _IDLE}
    wanted = lengths
    before = 0
    compressed: Compressed | None = None
    blocks = PromptBlocks()
    if isinstance(model.plan.evict, ChunkedEvictor) and reduce:
        shown = dataclasses.replace(options, progress=shifted(options.progress, 0, token_index.shape[1] + question))
        compressed = _compressed(model, cache, input_ids, token_index, real, shown, protected)
        token_index = compressed.token_index
        real = compressed.token_index >= 0
    elif propagator is not None and reduce:
        wanted = tuple(min(propagator.reread_tokens(length), length) for length in lengths)
    if wanted != lengths:
        before = token_index.shape[1]
        shown = dataclasses.replace(options, progress=shifted(options.progress, 0, before + max(wanted)))
        marked = token_index.masked_fill(~real, -1).to(model.model.device)
        seen = None if protected is None else protected.reindexed(marked)
        selection, report, blocks = choose(model, input_ids.gather(1, token_index), real.long(), shown, seen)
        if selection is not None:
            token_index, real = _chosen(token_index, selection)
    valid = None if mask is None else mask.bool().to(model.model.device)
    marked = token_index.masked_fill(~real, -1).to(model.model.device)
    layers = {} if compressed is None else compressed.layers
    cache.conversation.short_prompt = ShortPrompt(plan, marked, input_ids.shape[1], valid, lengths, protected, layers)
    # Where heads hold different tokens, nothing is evicted after this.
    cache.conversation.protected = None if protected is None or layers else protected.reindexed(marked)
    ids = input_ids.gather(1, token_index.clamp_min(0)).masked_fill(~real, options.pad_token_id or 0)
    end = ids.shape[1] + question
    shown = dataclasses.replace(options, progress=shifted(options.progress, before, before + end))
    read_chunks(model, ids, real.long(), cache, shown, prompt_end=end)
    record = cache.turn.record
    record.blocks.add(blocks)
    kept = tuple(real.sum(-1).tolist())
    if compressed is not None:
        record.asked = compressed.asked
        record.raised_to = compressed.raised_to
        record.evicted = set(layers)
        return
    record.report = report
    record.propagated = max(kept) if kept != lengths else None
    if plan.evict is None and propagator is not None and reduce:
        record.asked = max(wanted)


def _chosen(token_index: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
    """Return the chosen of the tokens [B, N], and which are real."""
    found = token_index.gather(1, selection.indices.to(token_index.device))
    real = selection.real()
    return found, torch.ones_like(found, dtype=torch.bool) if real is None else real.to(token_index.device)


def _plan_after(plan: Plan) -> Plan:
    """Return the plan that acts on the chosen tokens."""
    return Plan(
        evict=None if isinstance(plan.evict, ChunkedEvictor) else plan.evict,
        prefill=plan.prefill,
        codec=plan.codec,
        rest=plan.rest,
        name=plan.name,
    )


def ids_and_mask(
    cache: SieveCache, input_ids: Tensor, mask: Tensor | None, protected: ProtectedTokens | None, filler: int
) -> tuple[Tensor, Tensor]:
    """Return the ids of a cache's short prompt and all later tokens, and their mask.

    The cache gets the whole conversation, for use by budgets.
    """
    short = cache.conversation.short_prompt
    assert short is not None
    read = short.token_index.to(input_ids.device)
    rest = input_ids[:, short.length :]
    later = torch.ones_like(rest) if mask is None else mask[:, short.length :].long()
    real = torch.cat([(read >= 0).long(), later], 1)
    ids = torch.cat([input_ids.gather(1, read.clamp_min(0)).masked_fill(read < 0, filler), rest], 1)
    lengths = (input_ids.shape[1],) * len(ids) if mask is None else tuple(mask.sum(-1).tolist())
    cache.conversation.short_prompt = dataclasses.replace(short, lengths=lengths, protected=protected)
    if protected is not None and not short.layers:
        new = torch.arange(short.length, input_ids.shape[1], device=read.device).expand(len(ids), -1)
        cache.conversation.protected = protected.reindexed(torch.cat([read, new], 1).to(short.token_index.device))
    return ids, real


def _true_tokens(input_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the columns [B, N'] of each row's true tokens, and bool [B, N'], False for filler on their left."""
    if mask is None:
        columns = torch.arange(input_ids.shape[1], device=input_ids.device).expand(len(input_ids), -1)
        return columns, torch.ones_like(input_ids, dtype=torch.bool)
    real = mask.bool().to(input_ids.device)
    size = int(real.sum(-1).max())
    order = real.to(torch.uint8).argsort(dim=-1, stable=True)[:, -size:]
    return order, real.gather(1, order)
