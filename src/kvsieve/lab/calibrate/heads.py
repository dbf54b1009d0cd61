"""Retrieval heads, which fetch an answer from far back in the prompt: measured, after HeadKV and DuoAttention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsieve.core.scoring import score_dtype
from kvsieve.core.softmax import cap, sinks_of, softmax
from kvsieve.types import LayerContext


def kept_by_streaming(length: int) -> tuple[int, int]:
    """Return the numbers of sinks and recent tokens of a prompt, which do not count as far back.

    DuoAttention's 128 and 256, or an eighth and a quarter of a prompt of less than 1024 tokens.
    """
    return min(128, length // 8), min(256, length // 4)


@dataclass
class RetrievalScores:
    """Attention per KV head from the queries that produce an answer to the middle of the prompt.

    Queries: those that predict the answer's T tokens, the last T of prompt + answer without its last token. Middle: the
    prompt without its first `sinks` and last `recent` tokens. `beyond` is the share of attention on the middle. The
    score is the part of it on copies of the predicted token, or on the token before a copy. Both are means over the T
    queries, the query heads that share the KV head, and prompts; in [0, 1].
    """

    scores: dict[int, Tensor] = field(default_factory=dict)
    beyond: dict[int, Tensor] = field(default_factory=dict)
    prompts: int = 0

    def see(self, ctx: LayerContext, ids: Tensor, answer: Tensor) -> None:
        """Add a layer's attention. ctx: a pass over ids [1, N] and answer [1, T] without its last token, unpadded."""
        middle, copied = _places(ids[0], answer[0])
        weights = last_weights(ctx, answer.shape[1])[..., middle]
        for sums, part in ((self.beyond, weights), (self.scores, weights * copied.to(weights.device))):
            share = part.sum(-1).mean((1, 2)).double().cpu()
            sums[ctx.layer_idx] = sums.get(ctx.layer_idx, torch.zeros_like(share)) + share

    def result(self, sums: dict[int, Tensor], layers: int, kv_heads: int) -> list[list[float]]:
        """Return `scores` or `beyond` as [layers][KV heads], to 4 digits; 0 for layers with local attention."""
        nothing = torch.zeros(kv_heads, dtype=torch.float64)
        means = [sums.get(layer, nothing) / max(self.prompts, 1) for layer in range(layers)]
        return [[round(min(max(value, 0.0), 1.0), 4) for value in layer.tolist()] for layer in means]


def last_weights(ctx: LayerContext, count: int) -> Tensor:
    """Return the attention of the last `count` queries of a pass without padding, float32 at least [H, G, T, N]."""
    size = ctx.keys.shape[2]
    dtype = score_dtype(ctx.query.dtype)
    query = ctx.query[0, :, -count:].to(dtype).unflatten(0, (ctx.keys.shape[1], -1))
    logits = query @ ctx.keys[0, :, None].to(dtype).transpose(-1, -2) * ctx.scale
    sinks = sinks_of(ctx, *query.shape[:2], 1, 1)
    later = torch.ones(count, size, dtype=torch.bool, device=logits.device).triu(size - count + 1)
    return softmax(cap(logits, ctx).masked_fill(later, float("-inf")), sinks)


def _places(ids: Tensor, answer: Tensor) -> tuple[slice, Tensor]:
    """Return the middle of a prompt [N], and bool [T, M]: its places that each token of answer [T] may copy."""
    sinks, recent = kept_by_streaming(len(ids))
    middle = slice(sinks, len(ids) - recent)
    here = ids[None, middle] == answer[:, None]
    # The last token of the middle may precede a recent one; that is too near to count.
    return middle, here | torch.nn.functional.pad(here[:, 1:], (0, 1))
