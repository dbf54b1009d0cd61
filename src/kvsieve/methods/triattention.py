"""TriAttention: Efficient Long Reasoning with Trigonometric KV Compression (arXiv 2604.04921).

A head's queries before rotation are close to a fixed centre E[q]. A band f is a pair of rotated channels. A query head
scores a key k at distance t by the sum over bands of |E[q_f]| |k_f| cos(w_f t + phase_f) (eq. 6), which is the centre's
logit, plus (E[|q_f|] - |E[q_f]|) |k_f| (eq. 8), which is large where queries are spread. The score is averaged over the
distances from the next position plus 1, 2, 4, ... up to `n_future` (eq. 11) and standardised over the entries. A KV
head ranks by the maximum over its query heads (eq. 12, 13). It evicts after every 128 generated tokens.

The means are those of the conversation's own queries so far, or a profile's (`kvsieve calibrate --parts q_centres`).

Differences from the reference: there the means are always a calibration text's; each layer's KV heads choose for
themselves, as in the equations and in an option of the public code, where the default averages eq. 13 over layers; it
evicts at the end of prompts, too, where the public code keeps prompts whole (`budget="100%"` with `answer=` does);
protected entries, such as a prompt kept whole, do not count in the standardisation, as there; channels without rotation
are bands of one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kvsieve.core.scoring import score_dtype
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.arrays import set_numbers
from kvsieve.methods.base import first_real, model_facts
from kvsieve.methods.expected_attention import FutureQueries
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Filters, Profile, array_of
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, When

_LEAST_SPREAD = 1e-6


@dataclass(frozen=True, kw_only=True)
class TriAttention(FutureQueries, heads="own", query_aware=False):
    """Keep the keys that queries near their head's centre attend to at their distance.

    centres: [layers][query heads][2 D], mean queries before rotation, then the mean length of each channel's band;
    empty for those of the conversation. sinks: first tokens, always kept, without their queries. n_future: farthest of
    the future positions.
    """

    centres: Filters = field(default=(), repr=False)
    every: int | None = 128
    sinks: int = 0
    n_future: int = 1 << 16

    def __post_init__(self) -> None:
        set_numbers(self, "centres", "[layers][query heads][2 D]")
        super().__post_init__()

    @property
    def when(self) -> When:
        return When(steps=self.every, observes=not self.centres)

    def check_layer(self, index: int, num_layers: int, heads: int, query_heads: int, dim: int) -> None:
        layer = self.centres[index] if len(self.centres) == num_layers else ()
        if self.centres and [len(mean) for mean in layer] != [2 * dim] * query_heads:
            raise PlanError(
                f"TriAttention: the centres are of {len(self.centres)} layers and do not fit layer {index} of "
                f"{num_layers} with {query_heads} query heads of {dim}; make those of this model with `kvsieve "
                "calibrate --parts q_centres`, or leave them out"
            )

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
        mean = self._calibrated(ctx, dtype) if self.centres else ctx.state["mean"].to(dtype)
        centre, length = mean.split(size, -1)
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

    def _calibrated(self, ctx: LayerContext, dtype: torch.dtype) -> Tensor:
        """Return the profile's means of this layer, [B, Hq, 2 D]."""
        batch, heads, _, size = ctx.query.shape
        heads *= ctx.ranks.size
        self.check_layer(ctx.layer_idx, ctx.num_layers, 0, heads, size)
        own = self.centres[ctx.layer_idx][ctx.ranks.own(heads)]
        return torch.tensor(own, dtype=dtype).to(ctx.keys.device, non_blocking=True).expand(batch, -1, -1)


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


@register_method("triattention", title="TriAttention", paper="arXiv 2604.04921", phase="end of prompt, decode")
def triattention(
    budget: Budget | str | int | float = "20%",
    profile: Profile | str | os.PathLike[str] | None = None,
    every: int | None = 128,
    n_future: int = 1 << 16,
    sinks: int = 0,
) -> Plan:
    """Keep keys by a trigonometric series in their distance from the centre of their head's queries."""
    centres, model = array_of("q_centres", "triattention", profile)
    role = TriAttention(budget=Budget.parse(budget), centres=centres, every=every, n_future=n_future, sinks=sinks)
    return Plan(evict=role, profile=model)
