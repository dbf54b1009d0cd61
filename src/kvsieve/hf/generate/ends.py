"""Rows of a batch that end before others: generate goes on with padding behind them, which is no part of an answer."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.row_ends import RowEnds
from kvsieve.hf.generate.config import end_tokens


def note_ends(cache: SieveCache, sequences: Tensor, new: int, config: GenerationConfig, *, criteria: bool) -> None:
    """Let a cache know the padding behind the ends of an answer's rows, which later turns then hide.

    Args:
        cache: that has seen the sequences but for their last column.
        sequences: int64 [B, N] that generate has returned.
        new: columns that it has added.
        config: in effect for them.
        criteria: rows may have ended by criteria of the caller.
    """
    conversation, ends, pad = cache.conversation, end_tokens(config), config.pad_token_id
    answer = sequences[:, max(sequences.shape[1] - new, 0) :]
    # Without end tokens generate puts no padding behind a row.
    if not ends or len(answer) < 2 or len(answer) != conversation.batch or cache.turn.reordered:
        return
    if pad is None:
        pad = ends[0]
    stops = torch.isin(answer, torch.tensor(ends, device=answer.device))
    gone, unknown = stops.cumsum(1) > stops, False
    if criteria or config.stop_strings is not None:
        if pad in ends:
            # A row that ends in one token of these has chosen it, or ended before it.
            unknown = bool(stops.any())
        else:
            gone |= answer.eq(pad).flip(1).cumprod(1).flip(1).bool()
    if not unknown and not bool(gone.any()):
        return
    before = conversation.ends or RowEnds(gone[:, :0], answer[:, :0], fed=False)
    conversation.ends = before.then(conversation.caller_length_and_mask()[0] + 1 - answer.shape[1], gone, unknown)
