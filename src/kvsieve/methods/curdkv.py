"""CurDKV: Value-Guided KV Compression for LLMs via Approximated CUR Decomposition (arXiv 2509.15038).

The leverage of an entry's key is approximated by its squared norm, as a share of that of the `local` tokens of its
block; the same for its value. The score is the product of both, divided by the head's sum. The first `sinks` stay.
With `projection` > 0 keys and values are first multiplied by a Gaussian matrix of so many columns, as in the paper's
algorithm (20 there). `kind` takes one leverage alone, or their mean.

Differences from the reference (the authors' code in kvpress, whose defaults these are): one fixed Gaussian matrix
instead of a new one in every call; blocks are counted from each row's first token; padded batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsieve.core.rotation import sketch
from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.methods.base import ScoredEvictor, check_int, first_real
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@register_method("curdkv", title="CurDKV", paper="arXiv 2509.15038", phase="end of prompt", budget="20%")
@dataclass(frozen=True, kw_only=True)
class CurDKV(ScoredEvictor, heads="own", query_aware=False, fixed_counts=True):
    """Keep the entries with large keys and values among their neighbours; uses no queries.

    kind: "product", "mean", "key" or "value". local: tokens of a block that share one unit of leverage; 0 for the norms
    themselves. projection: columns of the Gaussian matrix; 0 for none. sinks: first tokens that stay.
    """

    stays = ("sinks",)

    kind: Literal["product", "mean", "key", "value"] = "product"
    local: int = 16
    projection: int = 0
    sinks: int = 4

    def __post_init__(self) -> None:
        check_int(self, "local", self.local, 0)
        check_int(self, "projection", self.projection, 0, most=4096)
        check_int(self, "sinks", self.sinks, 0)
        super().__post_init__()

    def scores(self, ctx: LayerContext) -> Tensor:
        keys, values = (self._leverage(part, ctx.valid) for part in (ctx.keys, ctx.values))
        scores = {"product": keys * values, "mean": (keys + values) / 2, "key": keys, "value": values}[self.kind]
        scores = scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
        return scores.masked_fill(first_real(ctx, self.sinks), float("inf"))

    def _leverage(self, part: Tensor, valid: Tensor | None) -> Tensor:
        """Return [B, H, N] for keys or values [B, H, N, D], 0 for padding."""
        part = part.to(score_dtype(part.dtype))
        if self.projection:
            part = part @ sketch(part.shape[3], self.projection, part.device).to(part.dtype)
        norms = part.square().sum(-1)
        if valid is None:
            return self._shares(norms) if self.local else norms
        norms = norms.masked_fill(~valid, 0)
        if not self.local:
            return norms
        # Blocks of each row's own tokens: padding goes to the right.
        order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True).expand(norms.shape)
        return torch.empty_like(norms).scatter_(-1, order, self._shares(norms.gather(-1, order)))

    def _shares(self, norms: Tensor) -> Tensor:
        """Divide [B, H, N] by the sum of each block."""
        length = norms.shape[-1]
        blocks = F.pad(norms, (0, -length % self.local)).unflatten(-1, (-1, self.local))
        shares = blocks / blocks.sum(-1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
        return shares.flatten(-2)[..., :length]
