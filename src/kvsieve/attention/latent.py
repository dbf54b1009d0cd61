"""Latent attention (MLA): a token's keys and values are linear in one latent, which is all that is stored of it.

It is multi-query attention: the up-projection of keys can be taken to the queries instead, and that of values to the
result, so one KV head of latents serves all query heads. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.attention.dense import dense_attention
from kvsieve.types import AttentionTerms

# Elements of expanded keys and values held at a time.
_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class UpProjection:
    """Weights by which a layer makes keys and values of its latents.

    An entry is a latent and, behind it, the rotated part of the key, which all heads share. A head's key is the latent
    times `keys`, beside the rotated part; its value is the latent times `values`.

    Attributes:
        keys: [Hq, Dn, R].
        values: [Hq, Dv, R].
        rotated_first: True where a head's key begins with the rotated part, False where it ends with it.
    """

    keys: Tensor
    values: Tensor
    rotated_first: bool = False

    @property
    def rank(self) -> int:
        """R, channels of a latent."""
        return self.keys.shape[2]

    def queries(self, query: Tensor) -> Tensor:
        """Queries [B, Hq, L, D] as they are matched with entries: [B, Hq, L, R + Dr]."""
        plain = self.keys.shape[1]
        turned = query[..., : query.shape[-1] - plain] if self.rotated_first else query[..., plain:]
        straight = query[..., query.shape[-1] - plain :] if self.rotated_first else query[..., :plain]
        return torch.cat([straight @ self.keys, turned], -1)

    def outputs(self, mixed: Tensor) -> Tensor:
        """Mixed values [B, Hq, L, Dv] of mixed latents [B, Hq, L, R]."""
        return mixed @ self.values.transpose(1, 2)

    def expand(self, entries: Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys [B, X, N, D] and values [B, X, N, Dv] that some heads make of entries [B, 1, N, R + Dr]."""
        latents, turned = entries[..., : self.rank], entries[..., self.rank :]
        straight = latents @ self.keys[heads].transpose(1, 2)
        turned = turned.expand(*straight.shape[:-1], -1)
        keys = torch.cat([turned, straight] if self.rotated_first else [straight, turned], -1)
        return keys, latents @ self.values[heads].transpose(1, 2)


def latent_attention(
    query: Tensor,
    entries: Tensor,
    up: UpProjection,
    *,
    scale: float,
    valid: Tensor | None = None,
    terms: AttentionTerms | None = None,
) -> Tensor:
    """Causal attention of the last L of N tokens over all N, as `dense_attention` over their keys and values.

    Many queries attend to keys and values that are expanded for some heads at a time, few to the latents themselves,
    whichever is less to compute.

    Args:
        query: [B, Hq, L, D].
        entries: [B, 1, N, R + Dr], a latent and the rotated part of the key.
        up: the layer's up-projection.
        scale: factor of the query-key products.
        valid: bool [B, 1, N], False for padding; None when all entries are real.
        terms: cap and sinks; None for neither.

    Returns:
        [B, Hq, L, Dv].
    """
    batch, query_heads, new, dim = query.shape
    plain, width = up.keys.shape[1], up.values.shape[1]
    more = entries.shape[-1] + up.rank - dim - width
    if new * more <= up.rank * (plain + width):
        mixed = dense_attention(
            up.queries(query), entries, entries[..., : up.rank], scale=scale, valid=valid, terms=terms
        )
        return up.outputs(mixed)
    step = max(1, _ELEMENTS // (batch * entries.shape[2] * (dim + width)))
    outs = []
    for first in range(0, query_heads, step):
        heads = slice(first, first + step)
        keys, values = up.expand(entries, heads)
        own = terms if terms is None or terms.sinks is None else AttentionTerms(terms.softcap, terms.sinks[heads])
        outs.append(dense_attention(query[:, heads], keys, values, scale=scale, valid=valid, terms=own))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)
