"""Reading a prompt: input checks and our own chunking (``generate(prefill_chunk_size=...)`` is not used)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsieve.errors import InputError, KvsieveWarning, short
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.session import StopForward
from kvsieve.hf.inputs import check_ids, check_mask, refuse_strange
from kvsieve.hf.prompt.probe_passes import rehearsal_tokens, rehearse

if TYPE_CHECKING:
    from kvsieve.hf.attach import Sieve


def prefill(
    sieve: Sieve,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cache: SieveCache,
    *,
    chunk: int | None = None,
    new_tokens: int = 0,
    pad_token_id: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    leave_last: bool = True,
    checked: bool = False,
    prompt_end: int | None = None,
    reduce: bool = True,
    question: int = 0,
) -> Tensor | None:
    """Check a prompt, begin a turn with it and run all chunks but the last (all of them unless `leave_last`).

    checked: the prompt is known to be fine and the mask complete. prompt_end: columns of the turn's prompt, where that
    goes on after these. reduce: False where the plan is not to act on it. question: last tokens that go on with the
    turn's prompt, which the plan has acted on. Returns the attention mask of the whole conversation,
    completed from the cache. Raises InputError.
    """
    mask = attention_mask
    if not checked:
        mask = whole_mask(sieve, input_ids, attention_mask, cache, pad_token_id)
        check_prompt(sieve, input_ids, mask)
    plan = sieve.plan if cache.restart is None else cache.restart.plan
    start, end = cache.num_seen, input_ids.shape[1]
    total = end - start
    full_mask = torch.ones_like(input_ids) if mask is None else mask.long()
    positions = (full_mask.cumsum(-1) - 1).masked_fill(full_mask == 0, 0)
    ends = chunk_ends(total, chunk, plan.queries(total))
    rehearsed = 0
    if plan.probes and reduce and not question:
        rehearsed = rehearsal_tokens(sieve, cache, full_mask)
        ends = rehearsed_ends(total, chunk, plan.queries(total)) if rehearsed else ends
    prompt_end = max(end, prompt_end or 0)
    if question:
        cache.begin_question(question)
    else:
        cache.begin_turn(prompt_end=prompt_end + rehearsed, new_tokens=new_tokens, reduce=reduce)
    cache.rehearsed = plan.probes
    for first, last in zip([0, *ends], ends, strict=False):
        if rehearsed and last == total:
            rehearse(sieve, cache, input_ids, full_mask)
            cache.prompt_end = prompt_end
        if leave_last and last == total:
            break
        cache.more_chunks = last < total
        try:
            with torch.no_grad():
                sieve.decoder(
                    input_ids=input_ids[:, start + first : start + last].to(sieve.model.device),
                    attention_mask=None if mask is None else mask[:, : start + last].to(sieve.model.device),
                    position_ids=positions[:, start + first : start + last].to(sieve.model.device),
                    past_key_values=cache,
                    use_cache=True,
                )
        except StopForward:
            pass
        finally:
            cache.more_chunks = False
        if progress is not None:
            progress(last, total)
    return mask


def chunk_ends(total: int, chunk: int | None, window: int) -> list[int]:
    """Where chunks of `chunk` tokens end; the last one holds at least `window` tokens when the prompt does."""
    if chunk is None:
        return [total]
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise InputError(f"chunk must be a whole number of at least 1 token, or None, got {short(chunk)}")
    return [end for end in range(chunk, total, chunk) if total - end >= min(window, total)] + [total]


def rehearsed_ends(total: int, chunk: int | None, window: int) -> list[int]:
    """The same where the last chunk holds just the window, one token at least: the rehearsal comes before it."""
    before = total - max(1, window)
    return [*chunk_ends(before, chunk, 0), total] if before > 0 else [total]


def whole_mask(
    sieve: Sieve, input_ids: Tensor, attention_mask: Tensor | None, cache: SieveCache, pad_token_id: int | None
) -> Tensor | None:
    """Check shapes, and complete the mask of a later turn with the padding the cache knows of."""
    sieve.check_cache(cache)
    check_ids(input_ids, sieve.config.vocab_size)
    if attention_mask is not None:
        check_mask(attention_mask, tuple(input_ids.shape))
        refuse_strange(attention_mask)
        attention_mask = attention_mask.long()
    if cache.batch not in (0, len(input_ids)):
        raise InputError(
            f"the cache holds {cache.batch} rows and got an input of {len(input_ids)}; use one cache per batch, or "
            "cache.batch_repeat_interleave to expand it"
        )
    if cache.restart is not None and not sieve.plan.shortens_prompt:
        raise InputError(
            f"the cache holds a shorter reading of its prompt, made under {cache.restart.plan.name!r}; go on under "
            "that plan, or start with a new cache"
        )
    if pad_token_id is None:
        pad_token_id = sieve.model.generation_config.pad_token_id
    seen, known_mask = cache.told()
    length = input_ids.shape[1]
    if length <= seen:
        raise InputError(
            f"the cache has seen {seen} tokens and input_ids holds {length}: pass the whole conversation, "
            "torch.cat([what was fed or generated before, the new tokens], dim=1)"
        )
    if attention_mask is None:
        attention_mask = _inferred_mask(sieve, input_ids, pad_token_id)
        if known_mask is not None:
            known = torch.cat([known_mask, known_mask.new_ones(len(known_mask), length - seen)], 1)
            known = known.long().to(input_ids.device)
            attention_mask = known if attention_mask is None else known * attention_mask
    return attention_mask


def _inferred_mask(sieve: Sieve, input_ids: Tensor, pad_token_id: int | None) -> Tensor | None:
    """What generate would infer: padding is where the pad token stands, unless that also ends a turn."""
    ends = sieve.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if pad_token_id is None or pad_token_id in ends:
        return None
    mask = input_ids.ne(pad_token_id)
    return None if bool(mask.all()) else mask.long()


def check_prompt(
    sieve: Sieve, input_ids: Tensor, mask: Tensor | None, *, question: int = 0, reduce: bool = True
) -> None:
    """Raise InputError for a prompt without tokens, padded on the right or longer than the context.

    Warns (KvsieveWarning) about one too short for the plan's observation window: nothing is evicted then. question:
    last tokens that the plan does not act on; reduce: False if it acts on none.
    """
    lengths = [input_ids.shape[1]] * len(input_ids) if mask is None else mask.sum(-1).tolist()
    if min(lengths) == 0:
        raise InputError(f"row {lengths.index(0)} of the batch is all padding; drop it or give it a token")
    if mask is not None and not bool(mask[:, -1].all()):
        raise InputError("the prompt is padded on the right; pad on the left: tokenizer.padding_side = 'left'")
    context = getattr(sieve.config, "max_position_embeddings", None)
    if context is not None and max(lengths) > context:
        raise InputError(
            f"the prompt has {max(lengths)} tokens, the model's context ends at {context}; shorten the prompt or use a "
            "model with a longer context"
        )
    window, reduced = sieve.plan.window, max(lengths) - question
    if reduce and reduced <= window:
        warnings.warn(
            f"the prompt has {reduced} tokens, {sieve.plan.name} needs more than its observation window of "
            f"{window}: nothing is dropped; use a longer prompt or a smaller window=",
            KvsieveWarning,
            stacklevel=4,
        )
