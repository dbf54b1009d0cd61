"""KV², KVzip with selective reconstruction (NVIDIA/kvpress, KVSquaredPress; after arXiv 2505.23416 and 2504.15364).

In every chunk of the context the tokens with the keys least similar to the chunk's mean key are chosen: KeyDiff's score
within the chunk, averaged over all heads and layers; as large a share of the chunk as the budget is of the context.
Only these are fed once more after the context, in their order and without a request, and every entry of the chunk ranks
by the largest attention from them, as under KVzip. That costs the budget's share of KVzip's passes over a context.

Differences from the reference: those of KVzip; a chunk includes a chat template's opening tokens; no second proposal
from a first reconstruction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvsieve.core.scoring import score_dtype
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.methods.base import by_token, skips
from kvsieve.methods.reconstruction import Fed, ReconstructionEvictor
from kvsieve.planning.budget import Budget
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Branch, ProbePasses
from kvsieve.types import LayerContext


@register_method("kvsquared", title="KV-Squared", paper="NVIDIA/kvpress", phase="end of prompt", budget="30%")
@dataclass(frozen=True, kw_only=True)
class KVSquared(ReconstructionEvictor, heads="all", ragged=True, takes_quotas=True, query_aware=False):
    """KVzip that feeds only the tokens with unusual keys again; for any question.

    budget: entries per layer and KV head, including the prefix, on average over layers and heads unless ``uniform``.
    prefix: first tokens that always stay, at least 1. chunk_length: tokens of a chunk. fed_share: share of a chunk's
    tokens that is fed again, in (0, 1]; None for the budget's share of the conversation. uniform: the same number in
    every head. skip_layers: layers that keep all, not counted.
    """

    chunk_length: int = 4096
    fed_share: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fed_share is not None and not 0 < self.fed_share <= 1:
            raise PlanError(f"KVSquared: fed_share must be a share in (0, 1], or None, got {self.fed_share!r}")

    @property
    def probe_tokens(self) -> int:
        return self.chunk_length

    @property
    def probe_identity(self) -> KVSquared:
        # By default the budget says how many tokens are fed.
        same = self.budget if self.fed_share is None else Budget(ratio=1.0)
        return replace(self, budget=same, uniform=False)

    def prepare(self, passes: ProbePasses, numbers: Tensor) -> tuple[Branch, Fed]:
        total = torch.zeros(numbers.shape, dtype=torch.float64, device=numbers.device)
        present = torch.zeros_like(total)
        chunks = numbers.div(self.chunk_length, rounding_mode="floor")

        def observe(ctx: LayerContext) -> None:
            if not skips(self.skip_layers, ctx):
                scores, real = unlike_chunk(ctx, chunks)
                total.add_(ctx.ranks.mean(by_token(ctx, scores).sum(1)).to(total))
                present.add_(ctx.ranks.mean(by_token(ctx, real.to(scores)).sum(1)).to(total))

        whole = passes.branch()
        whole.read_rest(observe=observe)
        # A token that no head stores cannot be chosen before others.
        means = (total / present.clamp_min(1)).masked_fill(present == 0, float("-inf"))

        def fed(row: int, tokens: Tensor, start: int) -> Tensor:
            own = means[row][passes.real[row]][start : start + self.chunk_length]
            best = own.argsort(descending=True, stable=True)[: self._fed_count(len(own), len(tokens))]
            return tokens[start + best.sort().values]

        return whole, fed

    def _fed_count(self, chunk: int, length: int) -> int:
        """Return how many tokens of a `chunk` of a conversation of `length` tokens are fed."""
        share = chunk * self.entries(length) // length if self.fed_share is None else int(chunk * self.fed_share)
        return max(share, 1)


def unlike_chunk(ctx: LayerContext, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Return KeyDiff's scores of a layer's entries within their chunks, [B, H, N], and a mask of the real ones.

    chunks: int64 [B, T], the chunk of each token, -1 for padding.
    """
    batch, heads, _, size = ctx.keys.shape
    index = ctx.index.long()
    chunk = chunks.to(index.device)[:, None].expand(-1, heads, -1).gather(2, index.clamp_min(0))
    real = (index >= 0) & (chunk >= 0)
    if ctx.valid is not None:
        real = real & ctx.valid
    keys = F.normalize(ctx.keys.to(score_dtype(ctx.keys.dtype)), dim=-1)
    place = chunk.clamp_min(0)[..., None].expand(-1, -1, -1, size)
    # The sum of a chunk's keys has the direction of their mean.
    sums = keys.new_zeros(batch, heads, int(chunks.max()) + 1, size)
    sums.scatter_add_(2, place, keys * real[..., None])
    anchors = F.normalize(sums, dim=-1).gather(2, place)
    return -(keys * anchors).sum(-1) * real, real
