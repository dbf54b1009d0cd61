"""Centres of the query heads' queries before rotation, for TriAttention (arXiv 2604.04921)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsieve.errors import UnsupportedModelError
from kvsieve.lab.calibrate.reading import read
from kvsieve.methods.triattention import TriAttention
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Fingerprint


def query_centres(model: Any, prompts: Sequence[Tensor], shape: Fingerprint, step: Callable[[], None]) -> Tensor | str:
    """Return the mean query of each head before rotation, then the mean length of each channel's rotated pair.

    Args:
        model: of transformers.
        prompts: int64 [1, N] each; every token counts alike.
        shape: of the model.
        step: called before each prompt.

    Returns:
        float64 [layers, query heads, 2 D], zeros for layers with local attention; or the reason why the model has none.
    """
    plan = Plan(evict=TriAttention(budget=Budget(ratio=1.0), every=None))
    total = torch.zeros(shape.layers, shape.query_heads, 2 * shape.head_dim, dtype=torch.float64)
    for ids in prompts:
        step()
        try:
            _, cache = read(model, plan, ids)
        except UnsupportedModelError as error:
            return str(error)
        for index, layer in cache.sieve_layers.items():
            if "mean" in layer.state:
                total[index] += layer.state["mean"][0].to("cpu", torch.float64) * ids.shape[1]
    return total / sum(ids.shape[1] for ids in prompts)
