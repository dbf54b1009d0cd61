"""Softmax of attention with the extra terms of some models: capped logits and learned sinks.

`asked` has both: queries (types.AttentionQueries), or the context of a method.
"""

from __future__ import annotations

from kvsieve.kernels.inputs import Queries
from kvsieve.lazy import Tensor
from kvsieve.lazy import functional as F


def cap(logits: Tensor, asked: Queries) -> Tensor:
    """Cap scaled logits of any shape in place, before masks; do nothing without a cap."""
    if asked.softcap is None:
        return logits
    return logits.div_(asked.softcap).tanh_().mul_(asked.softcap)


def sinks_of(asked: Queries, *shape: int) -> Tensor | None:
    """View the sinks in `shape`, such as (H, G, 1, 1) for logits [B, H, G, L, N]; None without sinks."""
    return None if asked.sinks is None else asked.sinks.view(shape)


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the last dimension; sinks add to the sum.

    Args:
        logits: [..., N].
        sinks: broadcastable to [..., 1]; None for none.

    Returns:
        The shape of `logits`; with sinks the weights sum to less than one.
    """
    if sinks is None:
        return logits.softmax(-1)
    padded = F.pad(logits, (0, 1))
    padded[..., -1:] = sinks
    return padded.softmax(-1)[..., :-1]
