"""New prefill of a conversation after its rotary tables changed with its length.

Keys in a cache were rotated by the tables for the conversation's length at that time. If a longer one has other tables,
the cache must be dropped, as transformers' own models of this kind do.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.compat import rereads_at_border
from kvsieve.hf.prompt.chunks import read_chunks
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.short import ids_and_mask
from kvsieve.hf.runtime import AttachedModel


def length_in_cache(cache: SieveCache, length: int, mask: Tensor | None) -> int:
    """Return the true tokens of a conversation in a cache, of the longest row.

    Args:
        cache: of the conversation.
        length: columns of the caller's conversation.
        mask: [B, length], None without padding.
    """
    short = cache.conversation.short_prompt
    if short is not None:
        return int((short.token_index >= 0).sum(-1).max()) + length - short.length
    return length if mask is None else int(mask.sum(-1).max())


def forget_other_tables(model: AttachedModel, cache: SieveCache, length: int) -> int:
    """Empty a cache if its keys were rotated by other tables than those of `length` tokens.

    Returns:
        The number of columns to prefill again; 0 for an unchanged cache.
    """
    before = cache.conversation
    if not before.num_seen or model.facts.tables.same(before.table_lengths, length):
        return 0
    cache.reset()
    cache.conversation.short_prompt = before.short_prompt
    cache.conversation.protected = before.protected
    cache.conversation.ends = None if before.ends is None else dataclasses.replace(before.ends, fed=False)
    return before.num_seen


def tokens_before_border(model: AttachedModel, cache: SieveCache, most: int) -> int:
    """Return the number of tokens, at most `most`, after a cache before generate would prefill everything again."""
    conversation = cache.conversation
    if not model.facts.tables.depend or not rereads_at_border(model.model):
        return most
    used = conversation.table_lengths
    length = conversation.longest
    return next((count for count in range(most) if not model.facts.tables.same(used, length + count + 1)), most)


def crosses(model: AttachedModel, cache: SieveCache) -> bool:
    """Return True if generate would prefill everything again for the next token after a cache."""
    return not tokens_before_border(model, cache, 1)


def read_again(
    model: AttachedModel, ids: Tensor, mask: Tensor | None, cache: SieveCache, options: ReadOptions, answered: int
) -> None:
    """Prefill a prompt and the answer so far, except the last chunk, in the middle of that answer.

    Args:
        model: the attached model.
        ids: int64 [B, N], in the cache's view: the short prompt, if shortened.
        mask: [B, N], None without padding.
        cache: with all but the last token, by other tables.
        options: of the prompt.
        answered: tokens of the answer among them.
    """
    length = ids.shape[1] if mask is None else int(mask.sum(-1).max())
    reread = forget_other_tables(model, cache, length)
    if not reread:
        return
    asked = options.constraints.question_tokens
    options = dataclasses.replace(options, progress=None, goes_on=False, leave_last=not asked)
    question = asked + answered if asked else 0
    if question:
        context_mask = None if mask is None else mask[:, :-question]
        read_chunks(model, ids[:, :-question], context_mask, cache, options, prompt_end=ids.shape[1])
        options = dataclasses.replace(options, leave_last=True)
    read_chunks(model, ids, mask, cache, options, question=question)
    cache.turn.record.reread = reread


def logits_at_border(
    model: AttachedModel, ids: Tensor, cache: SieveCache, options: ReadOptions, answered: int
) -> Tensor:
    """Prefill a conversation again, and return the logits [1, V] after it.

    Args:
        model: the attached model, under the cache's plan.
        ids: int64 [1, N], the caller's conversation, including the unprocessed last token.
        cache: of one row without padding, for which `crosses` is true.
        options: of the prompt.
        answered: tokens of the answer among ids.
    """
    mask = None
    ids = ids.to(model.model.device)
    if cache.conversation.short_prompt is not None:
        ids, mask = ids_and_mask(cache, ids, None, cache.conversation.protected, 0)
    read_again(model, ids, mask, cache, options, answered)
    found = model.feed(cache, ids[:, cache.num_seen :], mask, logits=1).logits
    assert found is not None
    return found[:, -1]
