"""Reading a conversation again where its rotary tables depend on its length, and were made for another one.

Keys that a cache holds were turned by the tables of the length that the conversation had. Where a longer one gets
other tables, what is read on them would be neither: transformers' own models of this kind drop the cache then, too.
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
    """Return the true tokens that a cache will have read of a conversation, of the longest row.

    Args:
        cache: what it continues.
        length: columns of the conversation as its caller knows it.
        mask: [B, length], None when nothing is padding.
    """
    short = cache.conversation.short_prompt
    if short is not None:
        return int((short.token_index >= 0).sum(-1).max()) + length - short.length
    return length if mask is None else int(mask.sum(-1).max())


def forget_other_tables(model: AttachedModel, cache: SieveCache, length: int) -> int:
    """Empty a cache whose keys were made by other rotary tables than those of a sequence of `length` tokens.

    Returns:
        The columns that are to be read again; 0 where the cache is as it was.
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
    """Return how many tokens, at most `most`, follow a cache before generate would read everything again."""
    tables = model.facts.tables
    conversation = cache.conversation
    if not tables.depend or not rereads_at_border(model.model):
        return most
    used = conversation.table_lengths
    length = conversation.longest
    return next((count for count in range(most) if not tables.same(used, length + count + 1)), most)


def crosses(model: AttachedModel, cache: SieveCache) -> bool:
    """Tell whether generate would read everything again for the next token behind what a cache holds."""
    return not tokens_before_border(model, cache, 1)


def read_again(
    model: AttachedModel, ids: Tensor, mask: Tensor | None, cache: SieveCache, options: ReadOptions, answered: int
) -> None:
    """Read a prompt and the answer so far, in the middle of that answer, but for the last chunk.

    Args:
        model: the attached model.
        ids: int64 [B, N], as the cache knows them: of a shortened prompt, the short one.
        mask: [B, N], None when nothing is padding.
        cache: what has read them but for the last token, by other tables.
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
    """Read a conversation again, and return the logits [1, V] behind it.

    Args:
        model: the attached model, under the cache's plan.
        ids: int64 [1, N], the conversation as the cache's caller knows it; the last token was not read yet.
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
