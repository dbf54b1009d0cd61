"""Chunked prefill (``generate(prefill_chunk_size=...)`` is not used)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.fed_ids import needs_ids, note_ids
from kvsieve.hf.forward.pieces import joins_chunks
from kvsieve.hf.forward.request import PassRequest, PassResult
from kvsieve.hf.prompt.borders import ends_in_columns
from kvsieve.hf.prompt.draft import drafted
from kvsieve.hf.prompt.options import Progress, ReadOptions
from kvsieve.hf.prompt.probe_passes import probe, tokens_to_probe
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan

# A pass over a leading chunk of a prompt.
BEGINNING = PassRequest(phase="prefill", last_chunk=False)


def read_chunks(
    model: AttachedModel,
    input_ids: Tensor,
    mask: Tensor | None,
    cache: SieveCache,
    options: ReadOptions,
    *,
    prompt_end: int | None = None,
    question: int = 0,
    plan: Plan | None = None,
) -> PassResult | None:
    """Begin a turn with a checked prompt, and run its chunks.

    Args:
        model: the attached model.
        input_ids: int64 [B, N], the whole conversation; the cache has seen the beginning.
        mask: [B, N], None without padding.
        cache: of this model and plan.
        options: the last chunk is skipped with ``leave_last``.
        prompt_end: columns of the turn's prompt, if it continues after these.
        question: last tokens of the turn's prompt; the plan has already acted on the tokens before them.
        plan: replaces the attached one.

    Returns:
        The result of the last pass, None if none was run.
    """
    short = cache.conversation.short_prompt
    acting = plan or (model.plan if short is None else short.plan)
    start = cache.num_seen
    end = input_ids.shape[1]
    total = end - start
    acts = options.constraints.acts and not question
    # Earlier chunks of the prompt count as well.
    length = end - cache.turn.start if options.goes_on else total
    # Some models' recurrent layers compute a single token otherwise, and take one of padding for a true one.
    least = 2 if cache.has_state else 0
    window = max(acting.queries(length), options.window, least)
    chunk = None if options.chunk is None else max(options.chunk, least)
    # Padding at the left would move borders that are counted from there, and the time of encoding.
    backwards = _counts_backwards(acting)
    exact = acts and (acting.prefill is not None or (acting.evict is not None and backwards))
    new = None if mask is None else mask[:, start:].bool()
    ends = ends_in_columns(new, total, lambda n: chunk_ends(n, chunk, window, backwards=backwards), window, exact=exact)
    whole = torch.ones_like(input_ids) if mask is None else mask
    probed = tokens_to_probe(model, cache, whole) if acting.probes and acts else 0
    if probed:
        ends = ends_in_columns(new, total, lambda n: probed_ends(n, chunk, window), window, exact=False)
    prompt_end = max(end, prompt_end or 0)
    if question:
        cache.conversation.begin_question(question)
    elif options.goes_on:
        cache.turn.resume(prompt_end + probed, options.new_tokens, acts)
    else:
        cache.begin_turn(prompt_end + probed, options.new_tokens, acts)
    if model.facts.tables.depend:
        # Columns after these are not padding.
        cache.turn.length = prompt_end - end + (end if mask is None else int(mask.sum(-1).max()))
    if acting.drafts and acts:
        cache.turn.drafted = drafted(model, acting, input_ids, mask, cache, chunk)
    together = options.together if options.together and joins_chunks(acting, cache, mask) else None
    _note_ids(acting, options, cache, input_ids)
    result = None
    for first, last in passes(ends, together):
        if probed and last == total:
            probe(model, cache, input_ids, mask, options.probed)
            cache.turn.prompt_end = prompt_end
        if options.leave_last and last == total:
            break
        several = chunk if together and last < total else None
        request = PassRequest(plan, "prefill", last == total, options.on_layer, chunk=several)
        columns = slice(start + first, start + last)
        result = model.feed(cache, input_ids[:, columns], None if mask is None else mask[:, : columns.stop], request)
        if options.progress is not None:
            options.progress(last, total)
    return result


def read_beginning(
    model: AttachedModel,
    input_ids: Tensor,
    cache: SieveCache,
    chunk: int | None,
    progress: Progress | None,
    request: PassRequest = BEGINNING,
    room: int = 0,
) -> None:
    """Prefill the beginning of a prompt in leading chunks; the next prefill continues from there.

    Args:
        model: the attached model.
        input_ids: int64 [1, N], the whole beginning.
        cache: of this model and plan, between turns or in the middle of a prompt.
        chunk: tokens per forward pass, None for all at once.
        progress: called with (tokens done, total tokens), between passes.
        request: of each pass.
        room: tokens after the beginning, for which buffers are reserved.
    """
    start = cache.num_seen
    end = input_ids.shape[1]
    if not cache.conversation.half_read:
        cache.begin_turn(end)
    cache.turn.prompt_end = end + room
    cache.turn.length = end
    step = chunk or end
    for first in range(start, end, step):
        last = min(first + step, end)
        model.feed(cache, input_ids[:, first:last], None, request)
        if progress is not None:
            progress(last - start, end - start)


def keeps_to_chunks(plan: Plan) -> bool:
    """Return True if a prompt's entries depend on the ends of its chunks.

    Sparse prefill chooses blocks per chunk, some evictors act on every chunk, and a codec alone encodes after each.
    """
    return plan.prefill is not None or _counts_backwards(plan)


def shared_end(plan: Plan, length: int, chunk: int | None) -> int:
    """Return the last end of a chunk within the first `length` tokens that all longer prompts share.

    This is `length` itself under a plan that does not depend on chunks; 0 without a shared border.
    """
    if not keeps_to_chunks(plan):
        return max(length, 0)
    if chunk is None or _counts_backwards(plan):
        return 0
    return max(length, 0) // chunk * chunk


def _note_ids(plan: Plan, options: ReadOptions, cache: SieveCache, input_ids: Tensor) -> None:
    """Keep the tokens of a conversation, for a plan that needs them and for readings that several plans share."""
    if needs_ids(plan) or options.on_layer is not None:
        note_ids(cache, input_ids)


def _counts_backwards(plan: Plan) -> bool:
    """Return True if chunks end so many tokens before the prompt's end, not after its start.

    So a row's chunks are the same in a batch with longer rows, if an evictor or a codec acts on each.
    """
    return plan.codec is not None if plan.evict is None else plan.evict.when.chunks


def chunk_ends(total: int, chunk: int | None, window: int, *, backwards: bool = False) -> list[int]:
    """Return the ends of chunks of `chunk` tokens; the last one has at least `window` tokens if the prompt does.

    backwards: the first one is the shortest, and not the last.
    """
    if chunk is None:
        return [total]
    if backwards:
        # A first token alone would do no harm here, but to recurrent layers.
        return [*sorted(range(total - max(chunk, window), 1, -chunk)), total]
    return [end for end in range(chunk, total, chunk) if total - end >= min(window, total)] + [total]


def passes(ends: list[int], together: Callable[[], int] | None) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each pass: one chunk, or as many leading ones as `together` returns."""
    first = at = 0
    while at < len(ends):
        leading = len(ends) - 1 - at
        at += 1 if together is None or leading < 2 else min(together(), leading)
        yield first, ends[at - 1]
        first = ends[at - 1]


def probed_ends(total: int, chunk: int | None, window: int) -> list[int]:
    """Return the ends of chunks if the last one has just the window, at least one token; probing precedes it."""
    before = total - max(1, window)
    return [*chunk_ends(before, chunk, 0), total] if before > 0 else [total]
