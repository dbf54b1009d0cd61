"""Choice of SnapKV's window and pooling for a model: the setting closest to full KV."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvsieve.core.scoring import Kernel
from kvsieve.errors import InputError
from kvsieve.hf.cache.batching import can_stack, stack
from kvsieve.lab.calibrate.options import Options
from kvsieve.lab.calibrate.reading import divergence, following
from kvsieve.methods import SnapKV
from kvsieve.shared.prompt import SharedPrompt

# Settings per batch of answers.
ROWS = 8

# Distances indistinguishable from the smallest on a few prompts: this factor, or this many nats more.
_ALIKE = 1.3
_NEAR = 0.005


def settings(options: Options, length: int) -> list[SnapKV]:
    """Return the settings to compare, by window. length: of the shortest prompt. Raises InputError if none fits."""
    grid = itertools.product(options.windows, options.poolings, options.kernels)
    least = options.budget.entries(length)  # type: ignore[union-attr]
    evictors = [
        SnapKV(budget=options.budget, window=window, kernel=kernel, pooling=pooling)  # type: ignore[arg-type]
        for window, pooling, kernel in grid
        if window < least
    ]
    if not evictors:
        raise InputError(
            f"a budget of {options.budget} keeps {least} entries of a prompt of {length}, no more than the narrowest "
            f"window of {min(options.windows)}; take longer prompts or a larger budget"
        )
    return evictors


def distances(model: Any, shared: SharedPrompt, evictors: Sequence[SnapKV], answer: Tensor) -> list[float]:
    """Return the KL of each setting's answer to full KV's, mean over the tokens of answer [1, T] except the first."""
    truth = following(model, shared.reduced(None), answer)
    found: list[float] = []
    for first in range(0, len(evictors), ROWS):
        caches = [shared.reduced(evictor) for evictor in evictors[first : first + ROWS]]
        together = [stack(caches)] if can_stack(caches) else caches
        for cache in together:
            found += divergence(truth, following(model, cache, answer))
    return found


def agreement(model: Any, shared: SharedPrompt, evictors: Sequence[SnapKV], answer: Tensor) -> list[float]:
    """Return the share of the tokens of answer [1, T] but the first where a setting's top token is full KV's."""
    best = following(model, shared.reduced(None), answer).argmax(-1)
    found = [following(model, shared.reduced(evictor), answer).argmax(-1) for evictor in evictors]
    return [(top == best).double().mean().item() for top in found]


def choose(evictors: Sequence[SnapKV], kl: Sequence[float]) -> int:
    """Return the index of the narrowest kernel with a distance close to the smallest, in its best setting.

    Among equally good kernels "auto" comes first, then the narrowest: more of its pieces fit into a small budget.
    """
    near = [index for index, value in enumerate(kl) if value <= max(_ALIKE * min(kl), min(kl) + _NEAR)]
    return min(near, key=lambda index: (_order(evictors[index].kernel), kl[index], index))


def _order(kernel: Kernel) -> int:
    return 0 if kernel == "auto" else kernel
