"""Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution (arXiv 2510.00636).

Future queries are assumed to be distributed like the prompt's before rotation: mean mu and covariance Sigma per query
head, without the first S tokens. Rbar is the mean rotation over the next `n_future` positions, mu' = Rbar mu and Sigma'
= Rbar Sigma Rbar^T. With the model's scale s, the expected logit of a key k is z = s mu'.k + s^2 k^T Sigma' k / 2. The
score is the softmax of z over all entries except the first S, averaged over the group, times ||v||_2. The first S stay.

Differences from the reference: queries are rotated back from their positions instead of projected again; statistics
cover all queries of all chunks, merged in float32; each row of a padded batch has its own positions and statistics;
with `every`, queries of generated tokens count; layers without positions are not rotated; learned sinks are part of the
softmax. Models with capped logits are refused: z has no such form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsieve.core.scoring import group_mean, score_dtype
from kvsieve.core.softmax import sinks_of, softmax
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, check_int, first_real, model_facts, positions, skips
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext

# Queries rotated back at a time, positions averaged at a time, and elements of k^T Sigma' formed at a time.
_QUERIES = 1024
_FUTURE = 64
_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class FutureQueries(ScoredEvictor, needs=("rotary",)):
    """An evictor that knows the mean of a prompt's queries before rotation, without those of the first `sinks` tokens.

    It is in ``ctx.state["mean"]``, [B, Hq, D]; with `_scatters` also their scatter matrix, [B, Hq, D, D], and
    ``ctx.state["queries"]`` has their number, [B]. n_future: future positions that `average_turn` averages over.
    """

    stays: ClassVar[tuple[str, ...]] = ("sinks",)

    sinks: int = 4
    n_future: int = 512

    def __post_init__(self) -> None:
        check_int(self, "sinks", self.sinks, 0)
        check_int(self, "n_future", self.n_future, 1, most=1 << 16)
        super().__post_init__()

    @property
    def _scatters(self) -> bool:
        return False

    def observe(self, ctx: LayerContext) -> None:
        if skips(self.skip_layers, ctx):
            return
        new = ctx.query.shape[2]
        place = positions(ctx)[:, 0, -new:]
        counted = place >= self.sinks
        if ctx.valid is not None:
            counted &= ctx.valid[:, 0, -new:]
        for start in range(0, new, _QUERIES):
            part = slice(start, start + _QUERIES)
            facts = model_facts(ctx)
            self._add(
                ctx, facts.rotate(ctx.layer_idx, ctx.query[:, :, part], place[:, part], inverse=True), counted[:, part]
            )

    def _add(self, ctx: LayerContext, query: Tensor, counted: Tensor) -> None:
        """Merge queries [B, Hq, L, D], those `counted` [B, L], into the statistics (Chan, Golub and LeVeque)."""
        batch, heads, _, size = query.shape
        state = ctx.state
        weight = counted.to(query.dtype)[:, None, :, None]
        if "queries" not in state:
            state["queries"] = query.new_zeros(batch)
            state["mean"] = query.new_zeros(batch, heads, size)
            if self._scatters:
                state["scatter"] = query.new_zeros(batch, heads, size, size)
        before = state["queries"]
        added = counted.sum(-1).to(query.dtype)
        total = before + added
        mean = (query * weight).sum(2) / added.clamp_min(1)[:, None, None]
        moved = mean - state["mean"]
        share = (added / total.clamp_min(1))[:, None, None]
        if self._scatters:
            centred = (query - mean[:, :, None]) * weight
            between = (before[:, None, None] * share)[..., None] * moved[..., None] * moved[..., None, :]
            state["scatter"] = state["scatter"] + centred.transpose(-1, -2) @ centred + between
        state["mean"] = state["mean"] + moved * share
        state["queries"] = total

    def future(self, device: torch.device) -> Tensor:
        """Return the distances of the future positions from the next one, int64 [F]."""
        return torch.arange(self.n_future, device=device)

    def average_turn(self, ctx: LayerContext, dtype: torch.dtype) -> Tensor:
        """Return the mean rotation over each row's next positions, [B, D, D], to multiply row vectors with."""
        size = ctx.keys.shape[3]
        device = ctx.keys.device
        basis = torch.eye(size, dtype=dtype, device=device)[None, :, None]
        future = self.future(device)
        average: dict[int, Tensor] = {}
        for length in dict.fromkeys(ctx.step.lengths):
            total = basis.new_zeros(size, size)
            for part in future.split(_FUTURE):
                place = part[None] + length
                vectors = basis.expand(-1, -1, place.shape[1], -1)
                total += model_facts(ctx).rotate(ctx.layer_idx, vectors, place)[0].sum(1)
            average[length] = total / len(future)
        return torch.stack([average[length] for length in ctx.step.lengths])


@register_method(
    "expectedattention", title="Expected Attention", paper="arXiv 2510.00636", phase="end of prompt", budget="20%"
)
@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(FutureQueries, needs=("rotary", "uncapped"), heads="own", query_aware=False):
    """Keep the entries that later queries are expected to attend to, judged by the prompt's queries.

    sinks: S first tokens, always kept, without their queries. n_future: future positions that the rotation is averaged
    over. use_covariance: False for the mean alone. use_vnorm: weigh by the values' norms.
    """

    use_covariance: bool = True
    use_vnorm: bool = True

    @property
    def _scatters(self) -> bool:
        return self.use_covariance

    def scores(self, ctx: LayerContext) -> Tensor:
        batch, heads, length, size = ctx.keys.shape
        dtype = score_dtype(ctx.keys.dtype)
        turn = self.average_turn(ctx, dtype)
        mean = (ctx.state["mean"].to(dtype) @ turn).view(batch, heads, -1, size) * ctx.scale
        spread = None
        if self.use_covariance:
            count = ctx.state["queries"].to(dtype).clamp_min(1)[:, None, None, None]
            spread = turn[:, None].transpose(-1, -2) @ (ctx.state["scatter"].to(dtype) / count) @ turn[:, None]
            spread = spread.view(batch, heads, -1, size, size) * (ctx.scale**2 / 2)
        block = max(1, _BLOCK_ELEMENTS // (mean.numel()))
        parts = []
        for start in range(0, length, block):
            keys = ctx.keys[:, :, start : start + block].to(dtype)
            logits = mean @ keys.transpose(-1, -2)
            if spread is not None:
                logits += ((keys[:, :, None] @ spread) * keys[:, :, None]).sum(-1)
            parts.append(logits)
        sinks = first_real(ctx, self.sinks)
        hidden = sinks if ctx.valid is None else sinks | ~ctx.valid
        logits = torch.cat(parts, -1).masked_fill(hidden[:, :, None], float("-inf"))
        expected = softmax(logits, sinks_of(ctx, heads, -1, 1))
        scores = group_mean(expected.flatten(1, 2), heads)
        if self.use_vnorm:
            scores = scores * ctx.values.to(dtype).norm(dim=-1)
        return scores.masked_fill(sinks, float("inf"))
