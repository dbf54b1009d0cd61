"""Models, prompts and options of generation that most tests share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from small import fill
from tiny_models import build


@functools.cache
def tiny_model(
    family: str = "llama", dtype: torch.dtype = torch.float64, *, filled: bool = False, **config: Any
) -> PreTrainedModel:
    """Return a tiny random model, built once in this process: whoever changes it builds one of its own.

    Args:
        family: as `build` takes it.
        dtype: of the weights.
        filled: with weights that depend on no release of transformers.
        config: values laid over the family's own.
    """
    model = build(family, dtype=dtype, **config)
    return fill(model) if filled else model


def tiny_prompt(rows: int = 1, size: int = 60, *, seed: int = 0, low: int = 2, high: int = 120) -> Tensor:
    """Return random tokens, int64 [rows, size], of ids from `low` up to `high`, exclusive."""
    return torch.randint(low, high, (rows, size), generator=torch.Generator().manual_seed(seed))


def padded_prompt(size: int, padding: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and mask, int64 [2, size], of two rows, the second with so many tokens of padding before it."""
    ids = tiny_prompt(2, size, seed=seed)
    mask = torch.ones_like(ids)
    ids[1, :padding] = 0
    mask[1, :padding] = 0
    return ids, mask


def greedy(**more: Any) -> dict[str, Any]:
    """Return options of `generate` for the most probable tokens, as many as are asked for."""
    return {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more}
