"""Mask functions of transformers: which are causal, within a window or chunks, and which let more be seen."""

from __future__ import annotations

import torch
from transformers import masking_utils as made

from kvsieve.hf.compat import is_plain_mask

CAUSAL = made.causal_mask_function


def blocks(ids):
    return made.blockwise_overlay(torch.tensor([ids]))


def test_plain_masks():
    assert is_plain_mask(CAUSAL)
    assert is_plain_mask(made.sliding_window_causal_mask_function(4))
    assert is_plain_mask(made.or_masks(CAUSAL, blocks([-1, -1, -1])))
    window = made.sliding_window_overlay(4)
    assert is_plain_mask(made.and_masks(made.or_masks(CAUSAL, blocks([-1, -1])), window))


def test_masks_that_let_more_be_seen():
    assert not is_plain_mask(made.or_masks(CAUSAL, blocks([-1, 0, 0])))
    assert not is_plain_mask(made.or_masks(CAUSAL, made.sliding_window_overlay(4)))
    assert not is_plain_mask(made.sliding_window_overlay(4))
    assert not is_plain_mask(blocks([-1, -1]))
    assert not is_plain_mask(lambda batch, head, query, key: key <= query)
