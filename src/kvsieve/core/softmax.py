"""Softmax of attention with the extra terms of some models: capped logits and learned sinks."""

from __future__ import annotations

from kvsieve.lazy import Tensor
from kvsieve.lazy import functional as F
from kvsieve.types import AttentionTerms


def cap(logits: Tensor, terms: AttentionTerms | None) -> Tensor:
    """Cap scaled logits of any shape in place, before masks; do nothing without a cap."""
    if terms is None or terms.softcap is None:
        return logits
    return logits.div_(terms.softcap).tanh_().mul_(terms.softcap)


def sinks_of(terms: AttentionTerms | None, *shape: int) -> Tensor | None:
    """View the sinks in `shape`, such as (H, G, 1, 1) for logits [B, H, G, L, N]; None without sinks."""
    return None if terms is None or terms.sinks is None else terms.sinks.view(shape)


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
