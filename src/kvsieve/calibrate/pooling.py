"""Which window and pooling SnapKV needs on a model: those that stay closest to full KV."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvsieve.calibrate.options import Options
from kvsieve.calibrate.reading import divergence, following
from kvsieve.core.scoring import Kernel
from kvsieve.errors import InputError
from kvsieve.hf.cache.batching import can_stack, stack
from kvsieve.hf.shared import SharedPrompt
from kvsieve.methods import SnapKV

# Settings whose answers are computed together.
ROWS = 8

# Distances that a few prompts cannot tell from the smallest: so many times it, or so many nats more.
_ALIKE, _NEAR = 1.3, 0.005


def settings(options: Options, length: int) -> list[SnapKV]:
    """The settings to compare, window by window. length: of the shortest prompt. Raises InputError if none fits."""
    grid = itertools.product(options.windows, options.poolings, options.kernels)
    least = options.budget.entries(length)  # type: ignore[union-attr]
    made = [
        SnapKV(budget=options.budget, window=window, kernel=kernel, pooling=pooling)  # type: ignore[arg-type]
        for window, pooling, kernel in grid
        if window < least
    ]
    if not made:
        raise InputError(
            f"a budget of {options.budget} keeps {least} entries of a prompt of {length}, no more than the narrowest "
            f"window of {min(options.windows)}; take longer prompts or a larger budget"
        )
    return made


def distances(model: Any, shared: SharedPrompt, evictors: Sequence[SnapKV], answer: Tensor) -> list[float]:
    """KL of each setting's answer to that of full KV, mean over the tokens of answer [1, T] but the first."""
    truth = following(model, shared.reduced(None), answer)
    found: list[float] = []
    for first in range(0, len(evictors), ROWS):
        caches = [shared.reduced(evictor) for evictor in evictors[first : first + ROWS]]
        together = [stack(caches)] if can_stack(caches) else caches
        for cache in together:
            found += divergence(truth, following(model, cache, answer))
    return found


def agreement(model: Any, shared: SharedPrompt, evictors: Sequence[SnapKV], answer: Tensor) -> list[float]:
    """Share of the tokens of answer [1, T] but the first at which a setting's most likely token is full KV's."""
    best = following(model, shared.reduced(None), answer).argmax(-1)
    found = [following(model, shared.reduced(evictor), answer).argmax(-1) for evictor in evictors]
    return [(each == best).double().mean().item() for each in found]


def choose(evictors: Sequence[SnapKV], kl: Sequence[float]) -> int:
    """Index of the narrowest kernel whose distance is as good as the smallest, the nearest of its settings.

    Of kernels that serve alike "auto" comes first, then the narrowest: at a smaller budget more of its pieces fit.
    """
    near = [index for index, value in enumerate(kl) if value <= max(_ALIKE * min(kl), min(kl) + _NEAR)]
    return min(near, key=lambda index: (_order(evictors[index].kernel), kl[index], index))


def _order(kernel: Kernel) -> int:
    return 0 if kernel == "auto" else kernel
