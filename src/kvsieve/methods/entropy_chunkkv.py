"""EntropyGatedChunkKV: ChunkKV that cuts spiky chunks to their best tokens (NVIDIA/kvpress, after arXiv 2502.00299).

Chunks of `chunk_length` tokens rank by their mean score, summed over heads. The entropy of the scores in a chunk, over
the logarithm of its length, says whether they are spread. A chunk is spiky if its mean is at least the median of all
chunks and its entropy below their median: of such a chunk only the best `spiky_length` tokens are taken. Chunks fill
the budget in order; the best of the tokens left over fill the rest.

Differences from the reference: entries that `base` protects stay separately and count in no chunk; each row has its own
chunks and medians; ties go to the lower slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int, scored_by_name
from kvsieve.methods.chunkkv import ChunkKV, Chunks, best_first
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method

_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class EntropyChunkKV(ChunkKV, heads="all", query_aware=False):
    """Keep chunks by the mean of `base`'s scores, and of spiky chunks only the best tokens.

    chunk_length: tokens per chunk, at least 2. spiky_length: tokens taken of a spiky chunk, fewer than `chunk_length`.
    share: layers that keep the same tokens, chosen by the first of them.
    """

    spiky_length: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "chunk_length", self.chunk_length, 2)
        check_int(self, "spiky_length", self.spiky_length, 1)
        if self.spiky_length >= self.chunk_length:
            raise PlanError(
                f"EntropyChunkKV: spiky_length must be less than chunk_length={self.chunk_length}, got "
                f"{self.spiky_length}; raise chunk_length or lower spiky_length"
            )

    def chunk_ranks(self, chunks: Chunks) -> Tensor:
        total = chunks.scores.sum(1)
        means = chunks.means()
        spiky = (means >= _median(means, chunks)) & ((spread := entropy(total, chunks)) < _median(spread, chunks))
        size = total.shape[2]
        within = best_first(total.masked_fill(~chunks.judged, float("-inf")))
        taken = (within < torch.where(spiky, self.spiky_length, size)[..., None]) & chunks.judged
        left = total.masked_fill(taken | ~chunks.judged, float("-inf")).flatten(1)
        later = total[0].numel() + best_first(left).view_as(total)
        return chunks.ranks(-torch.where(taken, best_first(means)[..., None] * size + within, later))


def entropy(total: Tensor, chunks: Chunks) -> Tensor:
    """Return the entropy of the scores [B, C, S] in each chunk over its maximum, [B, C]; 0 for a chunk of one."""
    least = total.masked_fill(~chunks.judged, float("inf")).amin(-1, keepdim=True).clamp_max(0)
    shares = (total - least).masked_fill(~chunks.judged, 0)
    shares = shares / (shares.sum(-1, keepdim=True) + _EPSILON)
    found = -(shares * (shares + _EPSILON).log()).sum(-1) / chunks.sizes.clamp_min(2).log()
    return found.clamp(0, 1).masked_fill(chunks.sizes < 2, 0)


def _median(values: Tensor, chunks: Chunks) -> Tensor:
    """Return the lower median of the values [B, C] of chunks with judged entries, [B, 1]."""
    filled = chunks.sizes > 0
    ordered = values.masked_fill(~filled, float("inf")).sort(-1).values
    return ordered.gather(1, ((filled.sum(-1, keepdim=True) - 1) // 2).clamp_min(0))


@register_method("entropychunkkv", title="EntropyGatedChunkKV", paper="NVIDIA/kvpress", phase="end of prompt")
def entropychunkkv(
    budget: Budget | str | int | float = "20%",
    base: str = "snapkv",
    chunk_length: int = 10,
    spiky_length: int = 4,
    share: int = 1,
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Keep chunks of adjacent entries, and only the best tokens of chunks with few high scores."""
    scorer = scored_by_name("entropychunkkv", base, budget, skip_layers, every)
    return Plan(evict=EntropyChunkKV(base=scorer, chunk_length=chunk_length, spiky_length=spiky_length, share=share))
