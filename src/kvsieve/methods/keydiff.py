"""KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference (arXiv 2504.15364).

Keys similar to all others tend to get little attention. The anchor of a KV head is the mean of its normalised keys; an
entry's score is minus the cosine of its key with the anchor. Needs no queries.

`chunks=True` is the paper's block-wise form: after every chunk of a chunked prefill (``chunk=128`` is its block) all
stored entries, including the new chunk, are scored with their own anchor and reduced to the budget, so that memory is
bounded during prefill. A share of the budget is then one of the tokens so far. Chunks are counted from the prompt's
end, so that the first may be the shortest.

Differences from the reference: by default once, at the end of the prompt; no reserved recent entries; keys as stored,
after rotation; padded batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.methods.base import ScoredEvictor
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, When


@register_method("keydiff", title="KeyDiff", paper="arXiv 2504.15364", phase="end of prompt", budget="20%")
@dataclass(frozen=True, kw_only=True)
class KeyDiff(ScoredEvictor, heads="own", query_aware=False, fixed_counts=True):
    """Keep the keys least similar to the mean key; uses no queries. `chunks` evicts during prefill, too.

    chunks: also evict after each chunk of a chunked prompt; later chunks attend to the remaining entries.
    """

    chunks: bool = False

    @property
    def when(self) -> When:
        return When(chunks=self.chunks, steps=self.every)

    def scores(self, ctx: LayerContext) -> Tensor:
        keys = F.normalize(ctx.keys.to(score_dtype(ctx.keys.dtype)), dim=-1)
        if ctx.valid is None:
            anchor = keys.mean(2, keepdim=True)
        else:
            real = ctx.valid[:, :, None].to(keys.dtype)
            anchor = (real @ keys) / real.sum(-1, keepdim=True).clamp_min(1)
        scores = -(keys @ F.normalize(anchor, dim=-1).transpose(-1, -2)).squeeze(-1)
        if min(ctx.stored) < 3:
            # Two keys are equally like their mean, and rounding must not choose.
            few = torch.tensor([stored < 3 for stored in ctx.stored], device=scores.device)
            scores = scores.masked_fill(few[:, None, None], 0)
        return scores
