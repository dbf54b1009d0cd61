"""Join attention to parts of the entries by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Weighted sums of values [R, S, G, Dv], the largest logit and the sum of weights relative to it [R, S, G].
Sums = tuple[Tensor, Tensor, Tensor]


def joined(parts: Sequence[Sums], sinks: Tensor | None) -> Tensor:
    """Return the output [R, G, Dv] over all parts of the entries; sinks: [R, G], logits without a value, or None."""
    acc, top, total = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    most = top.amax(1, keepdim=True)
    if sinks is not None:
        most = torch.maximum(most, sinks[:, None])
    weight = (top - most).exp()
    norm = (total * weight).sum(1)
    if sinks is not None:
        norm = norm + (sinks - most[:, 0]).exp()
    return (acc * weight[..., None]).sum(1) / norm[..., None]
