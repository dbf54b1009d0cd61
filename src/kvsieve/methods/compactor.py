"""Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores (arXiv 2507.08143).

Two scores, without the first `sinks` and the last `recent` entries, which stay. Leverage: keys before rotation,
centred, times a Gaussian sketch of `sketch` columns, give X; an entry with row x gets x^T (X^T X + 0.01 I)^-1 x.
Attention: chunks of `chunk_length` tokens attend to themselves without a causal mask and without the scale; an entry
gets the mass of its chunk's queries, averaged over the group, times ||v||_2, then averaged with its two neighbours.
Both become z-scores over all entries and heads of a layer; the score is z(attention) + blending z(leverage). The
default blending is the share of entries dropped.

Differences from the reference: one fixed sketch for all heads and layers, none if it is as wide as the keys; z-scores
of each row of a batch by itself; the Gram matrix in float64; chunks of queries are counted over passes, from the first
token after the sinks, or of a later turn; entries without such queries (generated, or last of an earlier turn) count
with the mean mass 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from kvsieve.core.chunk_mass import ChunkedMass
from kvsieve.core.rotation import sketch as gaussian
from kvsieve.core.scoring import pool, score_dtype
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import (
    ScoredEvictor,
    check_int,
    first_real,
    last_real,
    refuse_unused,
    skips,
    unrotated_keys,
)
from kvsieve.methods.h2o import moved
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Traits
from kvsieve.types import LayerContext, Selection, When

_RIDGE = 1e-2
_LEAST_SPREAD = 1e-6


@register_method("compactor", title="Compactor", paper="arXiv 2507.08143", phase="end of prompt", budget="20%")
@dataclass(frozen=True, kw_only=True)
class Compactor(ScoredEvictor, needs=("rotary",), heads="all", query_aware=False):
    """Keep entries with unusual keys and those their own chunk attends to; ignores the question.

    parts: "both", or one score alone: "leverage" or "attention". blending: weight of leverage against attention, at
    least 0; None for the share of entries dropped. sketch: columns of the sketch of keys. chunk_length: tokens that
    attend to each other. sinks, recent: first and last tokens that stay.
    """

    stays = ("sinks", "recent")

    parts: Literal["both", "leverage", "attention"] = "both"
    blending: float | None = None
    sketch: int = 48
    chunk_length: int = 256
    sinks: int = 8
    recent: int = 4

    def __post_init__(self) -> None:
        if self.blending is not None and not 0 <= self.blending < math.inf:
            raise PlanError(f"Compactor: blending must be at least 0, or None; got {self.blending!r}")
        check_int(self, "sketch", self.sketch, 1)
        check_int(self, "chunk_length", self.chunk_length, 1, most=1 << 14)
        check_int(self, "sinks", self.sinks, 0)
        check_int(self, "recent", self.recent, 0)
        if self.parts != "both":
            other = "sketch" if self.parts == "attention" else "chunk_length"
            refuse_unused(self, f"parts={self.parts!r}", "blending", other)
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        traits = super().traits
        return replace(traits, needs=()) if self.parts == "attention" else traits

    @property
    def when(self) -> When:
        return When(steps=self.every, observes=self.parts != "leverage")

    def observe(self, ctx: LayerContext) -> None:
        if not skips(self.skip_layers, ctx) and ctx.step.phase == "prefill":
            ChunkedMass(ctx.state, self.chunk_length).add(ctx, self.sinks, self.recent)

    def forget(self, ctx: LayerContext, selection: Selection) -> None:
        slots = selection.indices.expand(-1, ctx.keys.shape[1], -1)
        for name in ("mass", "index") if "mass" in ctx.state else ():
            ctx.state[name] = ctx.state[name].gather(-1, slots)

    def scores(self, ctx: LayerContext) -> Tensor:
        fixed = first_real(ctx, self.sinks) | last_real(ctx, self.recent)
        counted = ~fixed if ctx.valid is None else ctx.valid & ~fixed
        counted = counted.expand(len(ctx.keys), -1, -1)
        total: Tensor | None = None
        if self.parts != "leverage":
            total = _standard(ctx, self._attention(ctx, counted), counted)
        if self.parts != "attention":
            leverage = _standard(ctx, self._leverage(ctx, counted), counted)
            total = leverage if total is None else total + leverage * self._blending(ctx, total)
        assert total is not None
        return total.masked_fill(fixed, float("inf"))

    def _blending(self, ctx: LayerContext, like: Tensor) -> Tensor:
        shares = [self.blending] * len(ctx.stored)
        if self.blending is None:
            shares = [max(1 - self.budget.entries(stored) / max(stored, 1), 0.0) for stored in ctx.stored]
        return torch.tensor(shares, dtype=like.dtype).to(like.device, non_blocking=True)[:, None, None]

    def _attention(self, ctx: LayerContext, counted: Tensor) -> Tensor:
        received = ChunkedMass(ctx.state, self.chunk_length)
        if "mass" not in ctx.state:
            received.add(ctx, self.sinks, self.recent)
        received.finish(self.recent)
        index = ctx.index if ctx.valid is None else ctx.index.masked_fill(~ctx.valid, -1)
        mass = torch.ones(index.shape, dtype=score_dtype(ctx.values.dtype), device=index.device)
        if ctx.state["mass"].numel():
            mass += moved(ctx.state["mass"] - 1, ctx.state["index"], index)
        ctx.state["mass"], ctx.state["index"] = mass, index.clone()
        scores = mass * ctx.values.to(mass.dtype).norm(dim=-1)
        return pool(scores.masked_fill(~counted, 0), 3, "avg", counted)

    def _leverage(self, ctx: LayerContext, counted: Tensor) -> Tensor:
        keys = unrotated_keys(ctx)
        hidden = ~counted[..., None]
        number = counted.sum(-1)[..., None, None].clamp_min(1)
        keys = keys - keys.masked_fill(hidden, 0).sum(2, keepdim=True) / number
        if self.sketch < keys.shape[3]:
            keys = keys @ gaussian(keys.shape[3], self.sketch, keys.device).to(keys.dtype)
        rows = keys.masked_fill(hidden, 0).double()
        gram = rows.transpose(2, 3) @ rows
        gram.diagonal(dim1=-2, dim2=-1).add_(_RIDGE)
        root = torch.linalg.cholesky(gram)
        solved = torch.linalg.solve_triangular(root, rows.transpose(2, 3), upper=False)
        return solved.square().sum(2).to(keys.dtype)


def _standard(ctx: LayerContext, scores: Tensor, counted: Tensor) -> Tensor:
    """Return z-scores of [B, H, N] over a row's counted entries in all heads of the layer, 0 for the others."""
    hidden = ~counted

    def total(part: Tensor) -> Tensor:
        return ctx.ranks.mean(part.masked_fill(hidden, 0).sum((1, 2), keepdim=True)) * ctx.ranks.size

    number = total(torch.ones_like(scores))
    centred = (scores - total(scores) / number.clamp_min(1)).masked_fill(hidden, 0)
    spread = (total(centred.square()) / (number - 1).clamp_min(1)).sqrt()
    return centred / spread.clamp_min(_LEAST_SPREAD)
