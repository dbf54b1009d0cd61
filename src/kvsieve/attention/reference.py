"""The slow definition of attention, which takes every request, and which every executor equals where it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvsieve.attention.join import Sums, joined
from kvsieve.attention.latent import Latents
from kvsieve.attention.request import (
    AttentionRequest,
    ChosenBlocks,
    DenseEntries,
    EncodedEntries,
    Executor,
    FlatEntries,
    Near,
    ScaledPart,
    Shown,
)
from kvsieve.core.kv_rows import Choice, KVRows
from kvsieve.core.scoring import score_dtype
from kvsieve.core.softmax import cap
from kvsieve.types import AttentionQueries


def reference_attention(request: AttentionRequest[Any, Any]) -> Tensor:
    """Attend part by part, all logits of a part at once, and join the parts.

    The output of a query that sees nothing is finite and otherwise undefined.
    """
    asked = request.asked
    sees = request.sees
    if isinstance(request.stored, KVRows):
        return _over_kv_rows(asked, request.stored, sees)
    batch, query_heads, new, _ = asked.query.shape
    *before, last = request.stored if isinstance(request.stored, tuple) else (request.stored,)
    parts = [*(_part(part, 0) for part in before), _part(last, new)]
    masks = _seen(sees, [part[0].shape[2] for part in parts], asked.query)
    if isinstance(sees, ScaledPart):
        # The part is attended to alone, and the others once more.
        own = sees.part.repeat_interleave(query_heads // sees.part.shape[1], 1)[:, :, None]
        parts = parts * 2
        masks = [masks[0] & own, masks[0] & ~own]
    sums = [
        _sums(
            asked,
            keys,
            values,
            mask if real is None else mask & real.repeat_interleave(query_heads // real.shape[1], 1),
            log_weight,
        )
        for (keys, values, real, log_weight), mask in zip(parts, masks, strict=True)
    ]
    if isinstance(sees, ScaledPart):
        sums[0] = _scaled(sums[0], sees.factor)
    sinks = None if asked.sinks is None else asked.sinks.to(sums[0][0].dtype).repeat(batch)[:, None]
    return joined(sums, sinks).view(batch, query_heads, new, -1).to(asked.query.dtype)


def _sums(asked: AttentionQueries, keys: Tensor, values: Tensor, mask: Tensor, log_weight: Tensor | None) -> Sums:
    """Return the sums of a part for R = B * Hq query heads with G = L queries (see `join`).

    mask: as in `Shown`. log_weight: [B, H, N], or None.
    """
    query = asked.query
    dtype = score_dtype(asked.query.dtype)
    keys, values = (part.to(dtype).repeat_interleave(query.shape[1] // keys.shape[1], 1) for part in (keys, values))
    logits = cap(query.to(dtype) @ keys.transpose(2, 3) * asked.scale, asked)
    if log_weight is not None:
        logits = logits + log_weight.to(dtype).repeat_interleave(query.shape[1] // log_weight.shape[1], 1)[:, :, None]
    logits = logits.masked_fill(~mask, torch.finfo(dtype).min)
    top = logits.amax(-1)
    weights = (logits - top[..., None]).exp()
    sums = weights @ values, top, weights.sum(-1)
    return tuple(part.flatten(0, 1)[:, None] for part in sums)  # type: ignore[return-value]


def _scaled(sums: Sums, factor: float) -> Sums:
    """Return the sums of a part with its log-sum-exp times a factor."""
    acc, top, total = sums
    return acc / total[..., None], factor * (top + total.log()), torch.ones_like(total)


def _part(stored: object, new: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return keys [B, H, N, D], values, real entries, and logarithms of weights [B, H, N], or None if all weigh 1.

    Real ones are bool [B, H or 1, L or 1, N], None for all.

    new: of the last entries so many are the queries' own, which see themselves, padding or not.
    """
    if isinstance(stored, FlatEntries):
        heads = stored.bias.shape[1]
        keys, values = (part[:, None].expand(-1, heads, -1, -1) for part in (stored.keys, stored.values))
        weights = None if stored.log_weight is None else stored.log_weight[:, None].expand(-1, heads, -1)
        return keys, values, stored.shown(new), weights
    if isinstance(stored, EncodedEntries):
        assert stored.length is None
        stored = DenseEntries(stored.store.keys, stored.store.values, stored.store.valid)
    if isinstance(stored, Latents):
        (keys, values), valid, weights = stored.up.expand(stored.entries), stored.valid, None
    else:
        assert isinstance(stored, DenseEntries)
        keys = stored.keys
        values = stored.values
        valid = stored.valid
        weights = stored.log_weight
        if stored.length is not None:
            real = stored.length.shown(keys.shape[2], new)[None, None]
            return keys, values, real if valid is None else real & valid[:, :, None], weights
    if valid is None:
        return keys, values, None, weights
    slots = torch.arange(keys.shape[2], device=keys.device)
    return keys, values, valid[:, :, None] | (slots == slots[len(slots) - new :, None]), weights


def _seen(sees: object, sizes: list[int], query: Tensor) -> list[Tensor]:
    """Return the masks of the visible entries of each part, bool, broadcastable to [B, Hq, L, N]."""
    length, (query_heads, new) = sum(sizes), query.shape[1:3]
    slots = torch.arange(length, device=query.device)
    if isinstance(sees, (Shown, ScaledPart)):
        mask = sees.mask.expand(*sees.mask.shape[:2], new, length)
    elif isinstance(sees, Near):
        mask = sees.window.sees(sees.positions[:, -new:, None], sees.positions[:, None])[:, None]
    else:
        mask = (slots <= slots[length - new :, None])[None, None]
        if isinstance(sees, ChosenBlocks):
            mask = mask & _by_entries(sees, query_heads)
    return list(mask.split(sizes, -1))


def _by_entries(sees: ChosenBlocks, query_heads: int) -> Tensor:
    """Chosen blocks, entry by entry: bool [B, Hq, L, N]."""
    grid = sees.grid
    chosen = sees.chosen
    full = (chosen & grid.visible(chosen.device)) | grid.diagonal(chosen.device)
    full = full.repeat_interleave(query_heads // chosen.shape[1], 1)
    full = full.repeat_interleave(grid.queries, 2).repeat_interleave(grid.block, 3)
    return full[:, :, : grid.new, grid.pad : grid.pad + grid.length]


def _over_kv_rows(asked: AttentionQueries, kv_rows: KVRows, choice: Choice | None) -> Tensor:
    """Attention of queries [X, G, D], each query head with entries of its own."""
    entries = kv_rows.span(0, kv_rows.size) if choice is None else choice.entries
    if entries.ndim == 2:
        entries = entries[:, None].expand(-1, asked.query.shape[1], -1)
    keys, values = kv_rows.read(entries)
    length = kv_rows.length if choice is None else None
    all_of_them = torch.ones(1, dtype=torch.bool, device=entries.device)
    mask = all_of_them if length is None else length.real(kv_rows.size)
    acc, top, total = _sums(asked.of(asked.query[:, :, None]), keys, values, mask, kv_rows.log_weights_at(entries))
    sinks = None if asked.sinks is None else asked.sinks.to(acc.dtype).flatten()[:, None]
    blend = None if choice is None else choice.blend
    out = joined([(acc, top, total)], sinks if blend is None else None)
    if blend is not None:
        weight, vector = (part.to(acc.dtype) for part in blend)
        out = out.view(*weight.shape, -1)
        out = weight[..., None] * out + (1 - weight[..., None]) * vector[:, None]
        if sinks is not None:
            # Beside the sinks stands all that the chosen entries are `weight` of.
            norm = (top + total.log()).view(weight.shape) - weight.log()
            out = out * (norm - sinks.view(weight.shape)).sigmoid()[..., None]
    return out.view(*asked.query.shape[:2], -1).to(asked.query.dtype)


REFERENCE = Executor("reference", lambda request: None, reference_attention)
