"""Latent attention (MLA): a token's keys and values are linear in one latent, which is all that is stored of it.

It is multi-query attention: the up-projection of keys can be taken to the queries instead, and that of values to the
result, so one KV head of latents serves all query heads. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvsieve.attention.request import AttentionRequest, DenseEntries, Executor
from kvsieve.types import AttentionQueries

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
        latents = entries[..., : self.rank]
        turned = entries[..., self.rank :]
        straight = latents @ self.keys[heads].transpose(1, 2)
        turned = turned.expand(*straight.shape[:-1], -1)
        keys = torch.cat([turned, straight] if self.rotated_first else [straight, turned], -1)
        return keys, latents @ self.values[heads].transpose(1, 2)


@dataclass
class Latents:
    """Latents that a layer stores.

    Attributes:
        entries: [B, 1, N, R + Dr], a latent and the rotated part of the key.
        up: the layer's up-projection.
        valid: bool [B, 1, N], False for padding; None when all entries are real.
    """

    entries: Tensor
    up: UpProjection
    valid: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class LatentQueries(AttentionQueries):
    """Queries that a layer with latent attention brings.

    Attributes:
        up: the layer's up-projection.
        keys: [B, Hq, L, D], the model's expansion of this pass's latents.
        values: [B, Hq, L, Dv], as well.
    """

    up: UpProjection
    keys: Tensor
    values: Tensor

    @cached_property
    def stored(self) -> AttentionQueries:
        return self.of(self.up.queries(self.query))

    def output(self, mixed: Tensor) -> Tensor:
        return self.up.outputs(mixed)


_Request = AttentionRequest[Latents, None]
_Attend = Callable[[AttentionRequest[DenseEntries, None]], Tensor]


def _why_not_absorbed(request: _Request) -> str | None:
    """Many queries attend to expanded keys and values, few to the latents: the way with fewer products is taken."""
    stored, (new, dim) = request.stored, request.asked.query.shape[2:]
    up = stored.up
    plain = up.keys.shape[1]
    width = up.values.shape[1]
    more = stored.entries.shape[-1] + up.rank - dim - width
    return None if new * more <= up.rank * (plain + width) else "it computes more for so many tokens"


def _absorbed(request: _Request, attend: _Attend) -> Tensor:
    asked = request.asked
    stored = request.stored
    entries = DenseEntries(stored.entries, stored.entries[..., : stored.up.rank], stored.valid)
    return stored.up.outputs(attend(AttentionRequest(asked.of(stored.up.queries(asked.query)), entries)))


def _expanded(request: _Request, attend: _Attend) -> Tensor:
    """Attend to keys and values that are expanded for some heads at a time."""
    stored = request.stored
    batch, query_heads, _, dim = request.asked.query.shape
    step = max(1, _ELEMENTS // (batch * stored.entries.shape[2] * (dim + stored.up.values.shape[1])))
    outs = []
    for first in range(0, query_heads, step):
        heads = slice(first, first + step)
        entries = DenseEntries(*stored.up.expand(stored.entries, heads), stored.valid)
        outs.append(attend(AttentionRequest(request.asked.heads(heads), entries)))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def latent_rows(attend: _Attend) -> tuple[Executor, ...]:
    """Return the executors for latents; attend: computes attention over entries."""
    return (
        Executor("latents", _why_not_absorbed, lambda request: _absorbed(request, attend)),
        Executor("expanded latents", lambda request: None, lambda request: _expanded(request, attend)),
    )
