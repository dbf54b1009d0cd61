"""Tokens that a cache still stores, for one conversation of its batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsieve.cache import LayerMemory, View
from kvsieve.errors import CacheStateError, InputError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layers import kind_of
from kvsieve.hf.kept_tokens.kept import Kept
from kvsieve.hf.kept_tokens.tokens import KeptLayer
from kvsieve.planning.segments import token_numbers


def kept_of(cache: SieveCache, ids: Tensor, row: int = 0, tokenizer: Any = None) -> Kept:
    """Return the tokens of a conversation that a cache still stores, by layer and head.

    Args:
        cache: between passes; it is not kept alive.
        ids: int64 [B, N], the caller's conversation; unprocessed tokens may follow.
        row: of the batch.
        tokenizer: decodes tokens.

    Raises:
        CacheStateError: the cache is empty, in the middle of a prompt, or its rows are beams.
        InputError: ids of another conversation, or no such row.
    """
    cache.check_copyable("looked at")
    conversation = cache.conversation
    batch, (length, mask) = conversation.batch, conversation.caller_length_and_mask()
    if not batch:
        raise CacheStateError("the cache has read nothing yet, so it holds no tokens: feed a prompt first")
    if cache.turn.reordered:
        raise CacheStateError(
            "the cache's rows are beams, which changed places while the answer was searched, and belong to no answer: "
            "look at a prompt that was read alone, sieve.kept(sieve.prefill(ids), ids), or generate without beams"
        )
    if ids.ndim != 2 or len(ids) != batch or ids.shape[1] < length:
        raise InputError(
            f"input_ids are {list(ids.shape)}, the cache has read {batch} rows of {length} tokens: pass the whole "
            "conversation, padding included, as it was fed"
        )
    if not 0 <= row < batch:
        raise InputError(f"row {row} of {batch}: expected 0 to {batch - 1}")
    if conversation.ends is not None:
        mask = conversation.ends.corrected(ids.new_ones(batch, length) if mask is None else mask)
        ids = conversation.ends.as_read(ids)
    numbers = token_numbers(mask, batch, length)[row]
    count = int(numbers.max()) + 1
    short = conversation.short_prompt
    before = 0 if short is not None else int((numbers[: cache.turn.start] >= 0).sum())
    lengths = conversation.prompt_lengths if short is None else short.lengths
    return Kept(
        method=cache.owner.plan.name,
        tokens=ids[row, :length].cpu()[numbers >= 0],
        prompt_start=min(before, count),
        prompt_end=min(lengths[row], count) if lengths else count,
        layers=_layers(cache, row, numbers, count),
        row=row,
        unreached="never reached" if short is None else "not read again",
        notes=tuple(_notes(cache)),
        tokenizer=tokenizer,
    )


def _layers(cache: SieveCache, row: int, numbers: Tensor, count: int) -> tuple[KeptLayer, ...]:
    growing = bool(cache.sieve_layers)
    found = []
    for index, layer in enumerate(cache.all_layers):
        words = kind_of(layer).words
        store = layer.memory
        if store is None or store.is_empty:
            found.append(KeptLayer(index, words, counts=layer.is_growing))
            continue
        tokens = _held(cache, index, store, row, numbers)
        stored, entries = _shares(tokens, count)
        read = None
        if layer.view is not None:
            read, _ = _shares(_viewed(layer.view, row, tokens), count)
        counts = layer.is_growing or not growing
        reached = _reached(cache, index, row, numbers, count)
        found.append(KeptLayer(index, words, counts, len(tokens), stored, read, reached, entries))
    return tuple(found)


def _held(cache: SieveCache, index: int, store: LayerMemory, row: int, numbers: Tensor) -> Tensor:
    """Return the numbers of the tokens that a layer stores, int64 [H, n], -1 for filler and padding."""
    short = cache.conversation.short_prompt
    columns = store.index if short is None else short.as_given(store.index, index)
    tokens = columns[row].long().cpu()
    valid = store.valid
    # A window's index holds positions, which do not count padding.
    if cache.all_layers[index].window is None:
        tokens = numbers[tokens.clamp_min(0)].masked_fill(tokens < 0, -1)
    return tokens if valid is None else tokens.masked_fill(~valid[row].cpu(), -1)


def _viewed(view: View, row: int, tokens: Tensor) -> Tensor:
    """Return the numbers of the stored tokens that the answer attends to, int64 [H', n]."""
    slots = view.slots[row].cpu()
    stored = tokens.repeat_interleave(len(slots) // len(tokens), 0)
    chosen = stored.gather(1, slots)
    if view.real is not None:
        chosen = chosen.masked_fill(~view.real[row].cpu(), -1)
    return torch.cat([chosen, stored[:, view.end :]], 1)


def _shares(tokens: Tensor, count: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the share of heads with each of `count` tokens, and the entries of each head; tokens: int64 [H, n]."""
    real = tokens >= 0
    return torch.bincount(tokens[real], minlength=count) / len(tokens), tuple(real.sum(1).tolist())


def _reached(cache: SieveCache, index: int, row: int, numbers: Tensor, count: int) -> Tensor | None:
    """Return the tokens that reached a layer, bool [count]; None for all."""
    short = cache.conversation.short_prompt
    reached = torch.ones(count, dtype=torch.bool)
    propagator = cache.owner.plan.propagate
    if short is not None:
        if propagator is not None and propagator.two_pass:
            columns = short.token_index[row].cpu()
            was_read = torch.zeros(short.length, dtype=torch.bool)
            was_read[columns[columns >= 0]] = True
            real = numbers[: short.length]
            reached[real[(real >= 0) & ~was_read]] = False
        return None if bool(reached.all()) else reached
    for tokens in cache.conversation.propagated:
        if tokens.layer < index:
            of_turn = numbers[tokens.start : tokens.end]
            columns = tokens.columns[row].long().cpu()
            on = numbers[columns[columns >= 0]]
            arrived = torch.zeros(count, dtype=torch.bool)
            arrived[on[on >= 0]] = True
            of_turn = of_turn[of_turn >= 0]
            reached[of_turn] &= arrived[of_turn]
    return None if bool(reached.all()) else reached


def _notes(cache: SieveCache) -> list[str]:
    """Return the limits of a map of positions."""
    notes = []
    reads = cache.turn.record.reads
    reader = cache.owner.plan.read
    if reader is not None:
        heads = sum(layer.store.heads for layer in cache.sieve_layers.values())
        read = ""
        if reads.tokens:
            read = f", {reads.entries / (reads.tokens * cache.conversation.batch * heads):.0f} entries on average"
        notes.append(f"among what is shown {type(reader).__name__} chooses for every token what it reads{read}")
    kinds = [kind_of(layer) for layer in cache.all_layers]
    if any(kind.state for kind in kinds):
        notes.append("recurrent states hold no tokens by position: what they remember is not shown")
    if any(kind.entries in ("window", "chunk") for kind in kinds):
        notes.append("windows hold their last tokens under every plan, and are not part of the shares")
    if any(kind.entries == "shared" for kind in kinds):
        notes.append("layers that read another layer's KV are counted with that layer")
    return notes
