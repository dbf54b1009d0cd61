"""TriAttention: Efficient Long Reasoning with Trigonometric KV Compression (arXiv 2604.04921).

A head's queries before rotation are close to a fixed centre E[q]. A band f is a pair of rotated channels. A query head
scores a key k at distance t by the sum over bands of |E[q_f]| |k_f| cos(w_f t + phase_f) (eq. 6), which is the centre's
logit, plus (E[|q_f|] - |E[q_f]|) |k_f| (eq. 8), which is large where queries are spread. The score is averaged over the
distances from the next position plus 1, 2, 4, ... up to `n_future` (eq. 11) and standardised over the entries. A KV
head ranks by the maximum over its query heads (eq. 12, 13). It evicts after every 128 generated tokens.

Differences from the reference: the centres are those of the conversation's own queries so far, not of a calibration
text; each layer's KV heads choose for themselves, as in the equations and in an option of the public code, where the
default averages eq. 13 over layers; it evicts at the end of prompts, too, where the public code keeps prompts whole
(`budget="100%"` with `answer=` does); protected entries, such as a prompt kept whole, are left out of the
standardisation, as there; channels without rotation are bands of one.
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
        # The mean lengths of bands follow the mean.
        super()._add(ctx, torch.cat([query, _lengths(query, _bands(ctx, query))], -1), counted)

    def future(self, device: torch.device) -> Tensor:
        return 2 ** torch.arange(self.n_future.bit_length(), device=device)

    def scores(self, ctx: LayerContext) -> Tensor:
        batch, heads, _, size = ctx.keys.shape
        dtype = score_dtype(ctx.keys.dtype)
        keys = ctx.keys.to(dtype)
        bands = _bands(ctx, keys)
        centre, length = ctx.state["mean"].to(dtype).split(size, -1)
        # A band's length is in each of its channels.
        spread = (length - _lengths(centre, bands)) / bands.sum(-1)
        weights = torch.cat([centre @ self.average_turn(ctx, dtype), spread], -1).view(batch, heads, -1, 2 * size)
        scores = weights @ torch.cat([keys, _lengths(keys, bands)], -1).transpose(-1, -2)
        sinks = first_real(ctx, self.sinks)
        competing = ~sinks if ctx.protected is None else ~(sinks | ctx.protected)
        if ctx.valid is not None:
            scores = scores.masked_fill(~ctx.valid[:, :, None], 0)
            competing = competing & ctx.valid
        return _standardised(scores, competing[:, :, None]).amax(2).masked_fill(sinks, float("inf"))


def _standardised(scores: Tensor, counted: Tensor) -> Tensor:
    """Return scores [B, H, G, N] minus their mean, over their deviation, both of the `counted` ones [.., N]."""
    number = counted.sum(-1, keepdim=True).clamp_min(1)
    centred = scores - scores.where(counted, 0).sum(-1, keepdim=True) / number
    variance = centred.where(counted, 0).square().sum(-1, keepdim=True) / number
    return centred / variance.sqrt().clamp_min(_LEAST_SPREAD)


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
