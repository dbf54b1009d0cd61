"""Attention of one new token over entries of which the older ones are encoded."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvsieve.cache.body import Body
from kvsieve.cache.packed import PackedStore
from kvsieve.cache.pool import BlockPool
from kvsieve.core.codes import rotation
from kvsieve.core.softmax import cap
from kvsieve.kernels.cpu import packed as native
from kvsieve.types import AttentionTerms

# Numbers that the plain path decodes at once.
_AT_ONCE = 1 << 20

# Weighted sums of values [R, S, G, Dv], the largest logit and the sum of weights relative to it [R, S, G].
_Sums = tuple[Tensor, Tensor, Tensor]


def packed_attention(
    query: Tensor, store: PackedStore, *, scale: float, terms: AttentionTerms | None = None, kernel: bool | None = None
) -> Tensor:
    """Attention of each KV head's queries over that head's entries; no decoded copy outlives a block.

    Args:
        query: [B, Hq, 1, D].
        store: what is stored, the token's own entry included.
        scale: factor of the query-key products.
        terms: cap and sinks; None for neither.
        kernel: use the compiled kernel; None where there is one.

    Returns:
        [B, Hq, 1, Dv].
    """
    batch, query_heads, _, dim = query.shape
    rows = batch * store.heads
    asked = query.reshape(rows, -1, dim).float() * scale
    kernel = (query.device.type == "cpu" and native.reason() is None) if kernel is None else kernel
    parts = [_over_exact(asked, store, terms)]
    for body in store.bodies:
        if body.width:
            parts.append((_compiled if kernel else _plain)(asked, body, terms))
    acc, top, total = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    most = top.amax(1, keepdim=True)
    if terms is not None and terms.sinks is not None:
        sinks = terms.sinks.float().view(store.heads, -1).repeat(batch, 1)[:, None]
        most = torch.maximum(most, sinks)
    weight = (top - most).exp()
    norm = (total * weight).sum(1)
    if terms is not None and terms.sinks is not None:
        norm = norm + (sinks - most).exp()[:, 0]
    out = (acc * weight[..., None]).sum(1) / norm[..., None]
    return out.reshape(batch, query_heads, 1, -1).to(query.dtype)


def _over_exact(query: Tensor, store: PackedStore, terms: AttentionTerms | None) -> _Sums:
    keys, values, valid = store.exact.keys.flatten(0, 1), store.exact.values.flatten(0, 1), store.exact.valid
    logits = cap(query @ keys.float().transpose(1, 2), terms)
    if valid is not None:
        real = valid.expand(-1, store.heads, -1).flatten(0, 1).clone()
        # Padding sees itself.
        real[:, -1] = True
        logits.masked_fill_(~real[:, None], float("-inf"))
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp()
    return (weights @ values.float())[:, None], top[..., 0][:, None], weights.sum(-1)[:, None]


def _turned(query: Tensor, part: BlockPool) -> tuple[Tensor, Tensor | None]:
    """Queries as encoded keys are matched with them, and what the keys' mean adds to every logit."""
    base = None if part.mean is None else (query @ part.mean[..., None])[..., 0]
    return query @ rotation(part.dim, query.device) if part.form.rotated else query, base


def _compiled(query: Tensor, body: Body, terms: AttentionTerms | None) -> _Sums:
    query, base = _turned(query, body.keys)
    softcap = None if terms is None else terms.softcap
    parts = _told(body.keys), _told(body.values)
    acc, top, total = native.attend(query, base, body.table, body.fills, body.codec.block, parts, softcap)
    return _turned_back(acc, total, body.values), top, total


def _turned_back(acc: Tensor, total: Tensor, part: BlockPool) -> Tensor:
    """Sums of values as they were before they were encoded."""
    if part.form.rotated:
        acc = acc @ rotation(part.dim, acc.device).T
    if part.mean is not None:
        acc = acc + total[..., None] * part.mean[:, None, None]
    return acc


def _told(part: BlockPool) -> dict[str, object]:
    codes, form = part.codes, part.form
    assert codes is not None
    levels = None if form.levels is None else _levels(form.levels)
    group = form.group if form.axis == "token" else 0
    return {**vars(codes), "levels": levels, "bits": form.bits, "dim": part.dim, "group": group}


@functools.lru_cache(maxsize=32)
def _levels(levels: tuple[float, ...]) -> Tensor:
    """Levels of all codes, at least 16 of them: the kernel looks up whole vectors."""
    return torch.tensor([*levels, *[0.0] * (16 - len(levels))])


def _plain(query: Tensor, body: Body, terms: AttentionTerms | None) -> _Sums:
    """In plain torch, some blocks of all KV rows at a time."""
    block, rows = body.codec.block, len(body.table)
    step = max(1, _AT_ONCE // (rows * block * max(body.keys.dim, body.values.dim)))
    out = []
    for start in range(0, body.table.shape[1], step):
        table, fills = body.table[:, start : start + step], body.fills[:, start : start + step]
        numbers = torch.arange(rows, device=table.device).repeat_interleave(table.shape[1])
        keys, values = (part.blocks(table.flatten(), numbers) for part in (body.keys, body.values))
        logits = cap(query @ keys.view(rows, -1, keys.shape[-1]).transpose(1, 2), terms)
        real = torch.arange(block, device=table.device) < fills[..., None]
        logits.masked_fill_(~real.flatten(1)[:, None], float("-inf"))
        # A KV row with no entry here has no largest logit.
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top.clamp_min(torch.finfo(torch.float32).min)).exp()
        out.append((weights @ values.view(rows, -1, values.shape[-1]), top[..., 0], weights.sum(-1)))
    acc, top, total = (torch.stack([part[i] for part in out], 1) for i in range(3))
    return acc, top, total
