"""TriAttention: Efficient Long Reasoning with Trigonometric KV Compression (arXiv 2604.04921).

Queries of a head before rotation lie close to a fixed centre. With bands f of two rotated channels, the centre E[q]_f
of a query head and a key k at distance t, the expected logit is a trigonometric series in t: the sum over f of
|E[q]_f| |k_f| cos(w_f t + phase_f). It is averaged over the next position plus 1, 2, 4, ... up to `n_future`. The sum
of (E[|q_f|] - |E[q]_f|) |k_f|, large where queries are spread, is added. A query head's scores are standardised over
the entries, and a KV head ranks by the maximum of its group. Evicts after every 128 generated tokens.

Differences from the reference (its public code): the centres are those of the conversation's own queries so far, not of
a calibration text; each layer's KV heads choose for themselves, an option there, whose default is one choice per KV
head for all layers; it evicts at the end of prompts, too, where the original keeps prompts whole (`budget="100%"` with
`answer=` does); channels without rotation are bands of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import first_real, model_facts
from kvsieve.methods.expected_attention import FutureQueries
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext

_LEAST_SPREAD = 1e-6


@register_method(
    "triattention",
    title="TriAttention",
    paper="arXiv 2604.04921",
    phase="end of prompt, decode",
    query_aware=False,
    summary="Keep keys by a trigonometric series in their distance from the centre of their head's queries.",
    budget="20%",
)
@dataclass(frozen=True, kw_only=True)
class TriAttention(FutureQueries, heads="own", query_aware=False):
    """Keep the keys that queries near their head's centre attend to at their distance.

    sinks: first tokens, always kept, without their queries. n_future: farthest of the future positions.
    """

    every: int | None = 128
    sinks: int = 0
    n_future: int = 1 << 16

    def _add(self, ctx: LayerContext, query: Tensor, counted: Tensor) -> None:
        # The mean lengths of bands are behind the mean.
        super()._add(ctx, torch.cat([query, _lengths(query, _bands(ctx, query))], -1), counted)

    def future(self, device: torch.device) -> Tensor:
        return 2 ** torch.arange(self.n_future.bit_length(), device=device)

    def scores(self, ctx: LayerContext) -> Tensor:
        batch, heads, _, size = ctx.keys.shape
        dtype = score_dtype(ctx.keys.dtype)
        keys = ctx.keys.to(dtype)
        bands = _bands(ctx, keys)
        centre, length = ctx.state["mean"].to(dtype).split(size, -1)
        spread = (length - _lengths(centre, bands)) / bands.sum(-1)
        # A band's length is in each of its channels.
        series = torch.cat([centre @ self.average_turn(ctx, dtype), spread], -1).view(batch, heads, -1, 2 * size)
        scores = series @ torch.cat([keys, _lengths(keys, bands)], -1).transpose(-1, -2)
        if ctx.valid is not None:
            scores = scores.masked_fill(~ctx.valid[:, :, None], 0)
        real = torch.ones_like(scores) if ctx.valid is None else ctx.valid[:, :, None].expand_as(scores).to(dtype)
        count = real.sum(-1, keepdim=True).clamp_min(1)
        centred = (scores - scores.sum(-1, keepdim=True) / count) * real
        deviation = (centred.square().sum(-1, keepdim=True) / count).sqrt()
        best = (centred / deviation.clamp_min(_LEAST_SPREAD)).amax(2)
        return best.masked_fill(first_real(ctx, self.sinks), float("inf")) if self.sinks else best


def _bands(ctx: LayerContext, like: Tensor) -> Tensor:
    """Return [D, D], 1 for channels that are rotated together, in the type of `like`."""
    size = like.shape[-1]
    basis = torch.eye(size, device=like.device, dtype=like.dtype)[None, None]
    place = torch.ones(1, size, dtype=torch.long, device=like.device)
    turned = model_facts(ctx).rotate(ctx.layer_idx, basis, place)[0, 0]
    return ((turned != 0) | (basis[0, 0] != 0)).to(like.dtype)


def _lengths(x: Tensor, bands: Tensor) -> Tensor:
    """Return the length of each channel's band, in the shape of `x`, [..., D]."""
    return (x.square() @ bands).sqrt()
