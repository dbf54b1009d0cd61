"""Prefill under any plan: entry point of all drivers."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kvsieve.errors import PlanError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.inputs import check_callable
from kvsieve.hf.prompt.borders import question_columns
from kvsieve.hf.prompt.checks import check_chunk, check_prompt, check_reader, whole_mask
from kvsieve.hf.prompt.chunks import read_chunks
from kvsieve.hf.prompt.options import ReadOptions, shifted
from kvsieve.hf.prompt.reread import forget_other_tables, length_in_cache
from kvsieve.hf.prompt.short import ids_and_mask, read_short_prompt
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan


def read_prompt(
    model: AttachedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cache: SieveCache,
    options: ReadOptions,
) -> tuple[Tensor, Tensor | None]:
    """Check and prefill a prompt, all chunks but the last if `leave_last`.

    Args:
        model: the attached model.
        input_ids: int64 [B, N], the whole conversation; only new tokens are prefilled.
        attention_mask: [B, N], 1 for tokens and 0 for padding; None without new padding.
        cache: of this model and plan.
        options: of the prefill.

    Returns:
        Ids [B, K] and mask to continue with. Under a plan that shortens prompts, these are the ids of the short prompt;
        `cache` then starts empty, also on a later turn, which prefills the whole conversation again. Otherwise they are
        the inputs.

    Raises:
        InputError: a prompt, or constraints, that do not fit.
        PlanError: the plan lacks a tokenizer.
    """
    plan = model.plan
    if isinstance(cache, SieveCache) and cache.conversation.half_read and not plan.shortens_prompt:
        options = dataclasses.replace(options, goes_on=True)
    _check_tokenizer(plan)
    check_callable("progress", options.progress)
    model.check_cache(cache)
    constraints = options.constraints.after_join(plan, cache)
    options = dataclasses.replace(options, constraints=constraints)
    ends = cache.conversation.ends
    if ends is not None:
        ends = cache.conversation.ends = ends.begin_turn(input_ids, cache.conversation.caller_length_and_mask()[0])
        input_ids = ends.as_read(input_ids)
    mask = whole_mask(model, input_ids, attention_mask, cache, options.pad_token_id)
    length = input_ids.shape[1]
    conversation = cache.conversation
    asked = constraints.checked_question(conversation.caller_length_and_mask()[0], mask, length)
    check_prompt(model, input_ids, mask, reduced=constraints.acts, question=asked, window=options.window)
    check_reader(model, input_ids, mask, options.new_tokens)
    question = question_columns(mask, asked)
    check_chunk(options.chunk)
    protected = constraints.protected_tokens(plan, cache, mask, input_ids.shape, question)
    protected = None if protected is None else protected.to(model.model.device)
    context = input_ids
    context_mask = mask
    if question:
        context = input_ids[:, :-question]
        context_mask = None if mask is None else mask[:, :-question]
    first = dataclasses.replace(options, leave_last=options.leave_last and not question)
    again = plan.shortens_prompt and (constraints.acts or conversation.short_prompt is None)
    reread = 0
    if not again and model.facts.tables.depend:
        reread = forget_other_tables(model, cache, length_in_cache(cache, length, mask))
        conversation = cache.conversation
        options, first = (dataclasses.replace(part, goes_on=part.goes_on and not reread) for part in (options, first))
    if again:
        read_short_prompt(model, context, context_mask, cache, first, protected=protected, question=question)
    else:
        if not plan.shortens_prompt:
            conversation.protected = protected
        if question:
            progress = shifted(options.progress, 0, length - cache.num_seen)
            first = dataclasses.replace(first, progress=progress)
            read_chunks(model, context, context_mask, cache, first, prompt_end=length)
    ids = input_ids
    if cache.conversation.short_prompt is not None:
        ids, mask = ids_and_mask(cache, input_ids, mask, protected, options.pad_token_id or 0)
    if question or not again:
        before = cache.num_seen - cache.turn.start if question else 0
        progress = shifted(options.progress, before, before + ids.shape[1] - cache.num_seen)
        read_chunks(model, ids, mask, cache, dataclasses.replace(options, progress=progress), question=question)
    cache.turn.record.reread = reread
    return ids, mask


def _check_tokenizer(plan: Plan) -> None:
    """Raise PlanError for a plan that needs a tokenizer and has none."""
    if plan.lacks_tokenizer:
        raise PlanError(
            f"{plan.name} feeds texts to a model, and there is no tokenizer to make token ids of them: use "
            "attach(model, plan, tokenizer=tokenizer), or attach plan.for_tokenizer(tokenizer)"
        )
