"""Checks of a prompt before its prefill."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from kvsieve.core.kv_rows import ReadFacts
from kvsieve.errors import InputError, KvsieveWarning, PlanError, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.checks import check_ends_known
from kvsieve.hf.inputs import check_callable, check_ids, check_mask, prompt_of, refuse_strange
from kvsieve.hf.model.context import context_of
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.profiles import Fingerprint


def check_chunk(chunk: int | None) -> None:
    """Raise InputError unless `chunk` is a number of tokens, or None."""
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise InputError(f"chunk must be a whole number of at least 1 token, or None, got {short(chunk)}")


def checked_beginning(model: AttachedModel, prompt: Any, cache: SieveCache, chunk: int | None, progress: Any) -> Tensor:
    """Return the ids int64 [1, N] of the beginning of a prompt, for prefill into a cache.

    Raises InputError, CacheStateError or PlanError; see Sieve.begin.
    """
    ids, _ = prompt_of(prompt, None)
    mask = whole_mask(model, ids, None, cache)
    if len(ids) != 1 or mask is not None:
        raise InputError(f"the beginning of a prompt is read one row at a time, without padding; got {len(ids)} rows")
    if model.plan.shortens_prompt:
        raise PlanError(
            f"{model.plan.name} reads a shorter prompt in place of the one given, which it must have whole: use "
            "sieve.prefill or sieve.generate"
        )
    check_chunk(chunk)
    check_callable("progress", progress)
    check_prompt(model, ids, mask, reduced=False)
    return ids


def whole_mask(
    model: AttachedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cache: SieveCache,
    pad_token_id: int | None = None,
) -> Tensor | None:
    """Check shapes, and complete the mask of a later turn with the padding known to the cache.

    Args:
        model: the attached model.
        input_ids: int64 [B, N], the whole conversation.
        attention_mask: [B, N]; None to infer it.
        cache: of the conversation.
        pad_token_id: padding token if there is no mask. Default None: no padding.

    Raises:
        InputError: ids or mask that do not fit.
        CacheStateError: the cache is another plan's or model's, or that of a beam search.
    """
    model.check_cache(cache)
    check_ids(input_ids, model.config.vocab_size)
    if attention_mask is not None:
        check_mask(attention_mask, tuple(input_ids.shape))
        refuse_strange(attention_mask)
        attention_mask = attention_mask.long()
    cache.turn.check_beams()
    check_ends_known(cache)
    rows = cache.conversation.batch
    short_prompt = cache.conversation.short_prompt
    if rows not in (0, len(input_ids)):
        raise InputError(
            f"the cache holds {rows} rows and got an input of {len(input_ids)}; use one cache per batch, or "
            "cache.batch_repeat_interleave to expand it"
        )
    if short_prompt is not None and not model.plan.shortens_prompt:
        raise InputError(
            f"the cache holds a shorter reading of its prompt, made under {short_prompt.plan.name!r}; go on under "
            "that plan, or start with a new cache"
        )
    seen, known_mask = cache.conversation.caller_length_and_mask()
    length = input_ids.shape[1]
    if length <= seen:
        raise InputError(
            f"the cache has seen {seen} tokens and input_ids holds {length}: pass the whole conversation, "
            "torch.cat([what was fed or generated before, the new tokens], dim=1)"
        )
    if attention_mask is None:
        if pad_token_id is not None and bool((input_ids == pad_token_id).any()):
            attention_mask = input_ids.ne(pad_token_id).long()
        if known_mask is not None:
            known = torch.cat([known_mask, known_mask.new_ones(len(known_mask), length - seen)], 1)
            known = known.long().to(input_ids.device)
            attention_mask = known if attention_mask is None else known * attention_mask
    ends = cache.conversation.ends
    if ends is None:
        return attention_mask
    return ends.corrected(torch.ones_like(input_ids) if attention_mask is None else attention_mask)


def check_prompt(
    model: AttachedModel, input_ids: Tensor, mask: Tensor | None, *, reduced: bool, question: int = 0, window: int = 0
) -> None:
    """Raise InputError for a prompt without tokens, padded on the right or longer than the context.

    Warns (KvsieveWarning) about one too short for the plan's observation window: nothing is evicted then. Prompts below
    the floor of its shares are expected.

    Args:
        model: the attached model.
        input_ids: int64 [B, N].
        mask: [B, N], None without padding.
        reduced: False if the plan does not act on the prompt.
        question: last tokens that the plan does not act on.
        window: observation windows besides the plan's.
    """
    lengths = [input_ids.shape[1]] * len(input_ids) if mask is None else mask.sum(-1).tolist()
    if min(lengths) == 0:
        raise InputError(f"row {lengths.index(0)} of the batch is all padding; drop it or give it a token")
    if mask is not None and not bool(mask[:, -1].all()):
        raise InputError("the prompt is padded on the right; pad on the left: tokenizer.padding_side = 'left'")
    context = context_of(model.config)
    if context is not None and max(lengths) > context:
        raise InputError(
            f"the prompt has {max(lengths)} tokens, the model's context ends at {context}; shorten the prompt or use a "
            "model with a longer context"
        )
    window = max(model.plan.window, window)
    longest = max(lengths) - question
    if reduced and model.plan.floor < longest <= window:
        warnings.warn(
            f"the prompt has {longest} tokens, {model.plan.name} needs more than its observation window of "
            f"{window}: nothing is dropped; use a longer prompt or a smaller window=",
            KvsieveWarning,
            stacklevel=4,
        )


def check_reader(model: AttachedModel, input_ids: Tensor, mask: Tensor | None, new_tokens: int) -> None:
    """Raise PlanError if the plan's reader cannot honour its budget in the answer to a prompt.

    Args:
        model: the attached model.
        input_ids: int64 [B, N].
        mask: [B, N], None without padding.
        new_tokens: of the answer; 0 if unknown, and the answer's first token finds out.
    """
    reader = model.plan.read
    if reader is None or not new_tokens:
        return
    lengths = {input_ids.shape[1]} if mask is None else set(mask.sum(-1).tolist())
    dim = Fingerprint.of(model.model).head_dim or 1
    for length in lengths:
        for layer in model.context.layers:
            reader.setting(ReadFacts(layer, model.num_layers, length, new_tokens, dim))
