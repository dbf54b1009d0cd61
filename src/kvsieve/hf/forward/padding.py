"""The attention mask of a pass, checked against the conversation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import InputError, UnsupportedOptionError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.compact import holes
from kvsieve.hf.inputs import check_mask, refuse_strange, strange


def checked_mask(
    mask: Any, cache: SieveCache, batch: int, new: int, device: torch.device
) -> tuple[Tensor | None, tuple[tuple[int, ...], ...]]:
    """Return the attention mask of all columns, bool [B, start + new], or None without padding.

    Also return, per row: true tokens of all columns, of this turn's and of the new ones, if the last is one, and the
    number of new padding columns after a token.
    """
    known = cache.conversation.mask
    start = cache.num_seen
    if mask is None:
        if known is not None:
            raise InputError(
                "earlier tokens of this cache are padding, so the pass needs the attention_mask of the whole "
                f"conversation, [{batch}, {start + new}]"
            )
        if cache.conversation.ends is None:
            return None, ()
        # A mask of ones, which generate leaves out.
        mask = torch.ones(batch, start + new, dtype=torch.bool, device=device)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UnsupportedOptionError("attention_mask must be 2-D, [batch, tokens seen and new]; others are refused")
    check_mask(mask, (batch, start + new), f"{start} tokens seen and {new} new ones")
    raw_mask = mask.to(device)
    mask = raw_mask.bool()
    past = mask[:, :start]
    differs = ~past if known is None else past != known
    mistaken = _mistaken(mask, cache)
    own = mask[:, cache.turn.start :], mask[:, start:], mask[:, -1:], holes(mask[:, start:])
    parts = (mask, *own, differs, mistaken, strange(raw_mask))
    # One copy from the device for all facts that the host needs.
    *rows, different, wrong, odd = (tuple(part) for part in torch.stack([part.sum(-1) for part in parts]).tolist())
    if any(odd):
        refuse_strange(raw_mask)
    if any(wrong):
        raise InputError(
            "attention_mask does not fit rows that ended before others of the batch: give 0 for the padding behind "
            "their ends, and 1 for the last column of it where a later turn has read the end token there, or use "
            "sieve.generate or model.generate, which know these columns"
        )
    changed = any(different)
    if changed and cache.forgets and start:
        raise InputError(
            "attention_mask says otherwise than before of tokens read earlier, which the model's recurrent or "
            "sliding-window layers cannot take back: pass the same mask for them, or start with a new cache"
        )
    if changed:
        for layer in cache.sieve_layers.values():
            if layer.is_initialized:
                layer.store.remask(past)
    if known is None and not changed and min(rows[0]) == start + new:
        return None, ()
    cache.conversation.mask = mask
    return mask, tuple(rows)


def _mistaken(mask: Tensor, cache: SieveCache) -> Tensor:
    """Return bool [B, n]: True where a mask [B, columns] confuses padding after a row's end with a token."""
    ends = cache.conversation.ends
    short = cache.conversation.short_prompt
    if ends is None:
        return mask[:, :0]
    before = 0 if short is None else short.length
    if short is not None:
        # Short prompts have no padding; later columns are counted after them.
        mask = torch.cat([mask.new_zeros(len(mask), before), mask[:, short.token_index.shape[1] :]], 1)
    return (mask != ends.corrected(mask))[:, before:]
