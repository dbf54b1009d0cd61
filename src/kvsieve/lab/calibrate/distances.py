"""FastKV's TSP layer: the distance of propagation to full context at every layer (eq. 3), and the choice of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvsieve.hf.kinds import growing_layers, layer_kinds
from kvsieve.hf.model.support import why_unsupported
from kvsieve.lab.calibrate.reading import divergence, following, read
from kvsieve.methods import TSP, SnapKV
from kvsieve.planning.plans import Plan

TOLERANCE = 0.05
KL_BOUND = 0.05


@dataclass(frozen=True)
class Distance:
    """Distance between propagation after one layer and full context, on one prompt or as a mean over several.

    last: squared L2 distance of the last prompt token's hidden state after the final norm; window: mean over the
    window's tokens; relative: `last` as a share of the squared norm under full context. kl: mean over the answer's
    tokens except the first.
    """

    last: float
    window: float
    norm: float
    kl: float

    @property
    def relative(self) -> float:
        return self.last / self.norm if self.norm else 0.0


def candidates(model: Any, num_layers: int, rate: Any, max_layer: int | None) -> tuple[list[int], str | None]:
    """Return the layers up to `max_layer` after which tokens can be dropped or, if there are none, the reason."""
    last = num_layers - 2 if max_layer is None else min(max_layer, num_layers - 2)
    reasons = {layer: why_unsupported(model, Plan(propagate=TSP(rate=rate, layer=layer))) for layer in range(last + 1)}
    growing = growing_layers(layer_kinds(model.config.get_text_config(decoder=True)))
    found = [layer for layer, reason in reasons.items() if reason is None and layer in growing]
    return found, None if found else next(iter(reasons.values()), "it has too few layers")


def distance(
    model: Any, ids: Tensor, layer: int, rate: Any, pooled: SnapKV, hidden: Tensor, answer: Tensor, truth: Tensor
) -> Distance:
    """Compare propagation after `layer`, with `pooled` ranking tokens, with full context.

    hidden: [1, >= window, C] final hidden states of the last prompt tokens under full context. truth: log-probabilities
    [1, T - 1, V] of answer [1, T].
    """
    part = TSP(rate=rate, layer=layer, window=pooled.window, kernel=pooled.kernel, pooling=pooled.pooling)
    reduced, cache = read(model, Plan(propagate=part), ids)
    full, reduced = (states[0, -pooled.window :].double() for states in (hidden, reduced))
    squared = (full - reduced).square().sum(-1)
    kl = divergence(truth, following(model, cache, answer))[0]
    return Distance(squared[-1].item(), squared.mean().item(), full[-1].square().sum().item(), kl)


def mean(of: Sequence[Distance]) -> Distance:
    """Average over prompts; FastKV's eq. 3 for `last`."""
    return Distance(*(sum(getattr(one, name) for one in of) / len(of) for name in ("last", "window", "norm", "kl")))


def is_near(found: Distance, tolerance: float | None) -> bool:
    return found.relative <= (TOLERANCE if tolerance is None else tolerance) and found.kl <= KL_BOUND


def choose_layer(found: Sequence[Distance], rule: str, tolerance: float | None) -> tuple[int, bool]:
    """Return the index of the chosen candidate, and whether the rule was met.

    "settled": the earliest from which all have a relative distance of at most `tolerance` (0.05) and a KL of at most
    0.05; if even the last exceeds that, the one with the smallest distance.
    "argmin": eq. 3, the smallest distance; with a `tolerance` (0) the earliest within (1 + tolerance) of it.
    """
    least = min(range(len(found)), key=lambda index: found[index].last)
    if rule == "argmin":
        bound = (1 + (tolerance or 0.0)) * found[least].last
        return next(index for index, candidate in enumerate(found) if candidate.last <= bound), True
    near = [is_near(candidate, tolerance) for candidate in found]
    if not near[-1]:
        return least, False
    return max((index + 1 for index, fine in enumerate(near) if not fine), default=0), True
