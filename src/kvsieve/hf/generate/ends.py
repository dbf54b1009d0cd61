"""Rows of a batch that end before others: generate appends padding, which does not belong to the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.row_ends import RowEnds
from kvsieve.hf.generate.config import end_tokens, padding_token
from kvsieve.hf.prompt.checks import whole_mask
from kvsieve.hf.runtime import AttachedModel


def note_ends(cache: SieveCache, sequences: Tensor, new: int, config: GenerationConfig, *, criteria: bool) -> None:
    """Record in a cache the padding after the ends of an answer's rows, for later turns to hide.

    Args:
        cache: has seen all but the last column of the sequences.
        sequences: int64 [B, N] returned by generate.
        new: columns added by it.
        config: in effect for them.
        criteria: rows may have ended by criteria of the caller.
    """
    conversation = cache.conversation
    ends = end_tokens(config)
    pad = config.pad_token_id
    answer = sequences[:, max(sequences.shape[1] - new, 0) :]
    # Without end tokens generate appends no padding to a row.
    if not ends or len(answer) < 2 or len(answer) != conversation.batch or cache.turn.reordered:
        return
    if pad is None:
        pad = ends[0]
    stops = torch.isin(answer, torch.tensor(ends, device=answer.device))
    after_end = stops.cumsum(1) > stops
    unknown = False
    if criteria or config.stop_strings is not None:
        if pad in ends:
            # A row that ends in one token of these has chosen it, or ended before it.
            unknown = bool(stops.any())
        else:
            after_end |= answer.eq(pad).flip(1).cumprod(1).flip(1).bool()
    if not unknown and not bool(after_end.any()):
        return
    before = conversation.ends or RowEnds(after_end[:, :0], answer[:, :0], fed=False)
    conversation.ends = before.then(conversation.caller_length_and_mask()[0] + 1 - answer.shape[1], after_end, unknown)


def plain_prompt(options: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
    """Return the ids that a plain generate is called with, None without any, and their mask."""
    ids = next((options[key] for key in ("inputs", "input_ids") if options.get(key) is not None), None)
    return ids, options.get("attention_mask")


def begin_plain_turn(
    model: AttachedModel, cache: Any, options: dict[str, Any], config: GenerationConfig
) -> tuple[dict[str, Any], Tensor | None]:
    """Return the options of a plain generate that continues after rows that ended early, as in sieve.generate.

    Args:
        model: the attached model.
        cache: given to the call, or None.
        options: of the call, all by name.
        config: in effect.

    Returns:
        options, and the caller's ids int64 [B, N] if they were replaced, else None.
    """
    ends = cache.conversation.ends if isinstance(cache, SieveCache) else None
    ids, given_mask = plain_prompt(options)
    if ends is None or not isinstance(ids, Tensor):
        return options, None
    ends = cache.conversation.ends = ends.begin_turn(ids, cache.conversation.caller_length_and_mask()[0])
    read = ends.as_read(ids)
    mask = whole_mask(model, read, given_mask, cache, padding_token(config))
    name = "inputs" if options.get("inputs") is not None else "input_ids"
    return {**options, "attention_mask": mask, name: read}, ids


def put_back(sequences: Tensor, ids: Tensor) -> None:
    """Write the caller's ids [B, N] into generate's sequences [B or more, N + new].

    Args:
        sequences: changed in place.
        ids: as given, before tokens replaced padding.
    """
    sequences[:, : ids.shape[1]] = ids.repeat_interleave(len(sequences) // len(ids), 0)
