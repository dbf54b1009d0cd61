"""Attention of one new token over entries of which the older ones are encoded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvsieve import kernels
from kvsieve.cache.body import Body
from kvsieve.cache.packed import PackedStore
from kvsieve.cache.pool import BlockPool
from kvsieve.core.codes import Codes
from kvsieve.core.kv_rows import DeviceLength
from kvsieve.core.rotation import rotation
from kvsieve.core.softmax import cap
from kvsieve.kernels.cpu import packed as native
from kvsieve.kernels.inputs import PackedBlocks
from kvsieve.types import AttentionTerms

# Numbers that the plain path decodes at once: what caches hold; on GPUs in fewer launches.
_AT_ONCE, _AT_ONCE_ON_GPUS = 1 << 20, 1 << 22

# Exact entries that the kernel takes at a time where none are encoded.
_TOKENS = 128

# Weighted sums of values [R, S, G, Dv], the largest logit and the sum of weights relative to it [R, S, G].
_Sums = tuple[Tensor, Tensor, Tensor]


def packed_attention(
    query: Tensor,
    store: PackedStore,
    *,
    scale: float,
    terms: AttentionTerms | None = None,
    kernel: bool | None = None,
    length: DeviceLength | None = None,
) -> Tensor:
    """Attention of each KV head's queries over that head's entries; no decoded copy outlives a block.

    Args:
        query: [B, Hq, 1, D].
        store: what is stored, the token's own entry included.
        scale: factor of the query-key products.
        terms: cap and sinks; None for neither.
        kernel: use a compiled kernel; None where there is one.
        length: exact entries that are there, known on the device only; the C kernel does not run then. None: all.

    Returns:
        [B, Hq, 1, Dv].
    """
    batch, query_heads, _, dim = query.shape
    rows = batch * store.heads
    asked = query.reshape(rows, -1, dim).float() * scale
    sinks = None if terms is None or terms.sinks is None else terms.sinks.float().view(store.heads, -1).repeat(batch, 1)
    bodies = [body for body in store.bodies if body.width]
    if kernel is not False and _fused(query, store, bodies):
        exact = _exact_by_triton(query.reshape(rows, -1, dim), store, scale, terms, length)
        out = _together([exact, *(_by_triton(asked, body, terms) for body in bodies)], sinks)
    elif kernel or (kernel is None and length is None and query.device.type == "cpu" and native.reason() is None):
        out = _by_kernel(asked, store, bodies, terms, sinks, narrow=query.dtype == torch.bfloat16)
    else:
        exact = _over_exact(asked, store, terms, length)
        out = _together([exact, *(_plain(asked, body, terms) for body in bodies)], sinks)
    return out.reshape(batch, query_heads, 1, -1).to(query.dtype)


def _together(parts: Sequence[_Sums], sinks: Tensor | None) -> Tensor:
    """Output [R, G, Dv] of all parts of the entries; sinks: [R, G]."""
    acc, top, total = (torch.cat([part[i] for part in parts], 1) for i in range(3))
    most = top.amax(1, keepdim=True)
    if sinks is not None:
        most = torch.maximum(most, sinks[:, None])
    weight = (top - most).exp()
    norm = (total * weight).sum(1)
    if sinks is not None:
        norm = norm + (sinks - most[:, 0]).exp()
    return (acc * weight[..., None]).sum(1) / norm[..., None]


def _by_kernel(
    query: Tensor,
    store: PackedStore,
    bodies: list[Body],
    terms: AttentionTerms | None,
    sinks: Tensor | None,
    *,
    narrow: bool,
) -> Tensor:
    """In C; query [R, G, D] -> [R, G, Dv]. narrow: as in `native.AskedBlocks`."""
    exact = native.AskedExact(query, store.exact.keys, store.exact.values, _seen(store))
    cap, tokens = None if terms is None else terms.softcap, bodies[0].tokens if bodies else _TOKENS
    if not bodies:
        return native.attend(None, exact, tokens=tokens, cap=cap, sinks=sinks)
    if len(bodies) == 1 and not bodies[0].values.turns:
        return native.attend(_encoded(query, bodies[0], narrow), exact, tokens=tokens, cap=cap, sinks=sinks)
    parts = [native.attend_in_parts(None, exact, tokens=tokens, cap=cap)]
    for body in bodies:
        acc, top, total = native.attend_in_parts(_encoded(query, body, narrow), None, tokens=body.tokens, cap=cap)
        parts.append((_turned_back(acc, total, body.values), top, total))
    return _together(parts, sinks)


def _fused(query: Tensor, store: PackedStore, bodies: list[Body]) -> bool:
    """Tell whether Triton's kernel does it: it knows of no numbers kept apart."""
    if not kernels.usable(query) or query.dtype != store.dtype:
        return False
    return not any(part.form.apart for body in bodies for part in (body.keys, body.values))


def _exact_by_triton(
    query: Tensor, store: PackedStore, scale: float, terms: AttentionTerms | None, length: DeviceLength | None
) -> _Sums:
    exact, alone = store.exact, None if terms is None else AttentionTerms(terms.softcap)
    count, keys, values = None if length is None else length.count, exact.keys, exact.values
    out, norm = kernels.exact_decode(query, keys, values, scale=scale, length=count, valid=exact.valid, terms=alone)
    return out.float()[:, None], norm[:, None], torch.ones_like(norm)[:, None]


def _by_triton(query: Tensor, body: Body, terms: AttentionTerms | None) -> _Sums:
    query, base = _turned(query, body.keys)
    keys, values = (_blocks(pool, query.device) for pool in (body.keys, body.values))
    softcap = None if terms is None else terms.softcap
    out, norm = kernels.packed_decode(query, base, body.table, body.fills, keys, values, softcap)
    total = torch.ones_like(norm)[:, None]
    return _turned_back(out[:, None], total, body.values), norm[:, None], total


def _blocks(pool: BlockPool, device: torch.device) -> PackedBlocks:
    codes, form = pool.codes, pool.form
    assert codes is not None
    levels = None if form.levels is None else _levels(form.levels, device)
    group = form.group if form.axis == "token" else 0
    return PackedBlocks(codes.packed, codes.scale, codes.zero, levels, form.bits, pool.dim, group)


def _seen(store: PackedStore, length: DeviceLength | None = None) -> Tensor | None:
    """Mask of the exact entries that are seen, bool [R or 1, size]; None for all. length: as in packed_attention."""
    valid, there = store.exact.valid, None if length is None else length.real(store.exact.size)[None]
    if valid is None:
        return there
    real = valid.expand(-1, store.heads, -1).flatten(0, 1)
    if there is not None:
        return real & there
    real = real.clone()
    # Padding sees itself.
    real[:, -1] = True
    return real


def _over_exact(query: Tensor, store: PackedStore, terms: AttentionTerms | None, length: DeviceLength | None) -> _Sums:
    keys, values, real = store.exact.keys.flatten(0, 1), store.exact.values.flatten(0, 1), _seen(store, length)
    logits = cap(query @ keys.float().transpose(1, 2), terms)
    if real is not None:
        logits.masked_fill_(~real[:, None], float("-inf"))
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp()
    return (weights @ values.float())[:, None], top[..., 0][:, None], weights.sum(-1)[:, None]


def _turned(query: Tensor, part: BlockPool) -> tuple[Tensor, Tensor | None]:
    """Queries as encoded keys are matched with them, and what the keys' mean adds to every logit."""
    base = None if part.mean is None else (query @ part.mean[..., None])[..., 0]
    if part.root is not None:
        query = query * part.root[:, None]
    return query @ rotation(part.dim, query.device) if part.form.rotated else query, base


def _encoded(query: Tensor, body: Body, narrow: bool) -> native.AskedBlocks:
    query, base = _turned(query, body.keys)
    return native.AskedBlocks(
        query, base, body.table, body.fills, _packed_part(body.keys), _packed_part(body.values), narrow
    )


def _turned_back(acc: Tensor, total: Tensor, part: BlockPool) -> Tensor:
    """Sums of values as they were before they were encoded."""
    if part.form.rotated:
        acc = acc @ rotation(part.dim, acc.device).T
    if part.root is not None:
        acc = acc * part.root[:, None, None]
    if part.mean is not None:
        acc = acc + total[..., None] * part.mean[:, None, None]
    return acc


def _packed_part(pool: BlockPool) -> native.PackedPart:
    """Addresses of a pool, found anew when its buffers change."""
    codes, form = pool.codes, pool.form
    assert codes is not None
    known = _known.get(pool)
    if known is None or known[0] is not codes:
        levels = None if form.levels is None else _levels(form.levels, codes.packed.device)
        group = form.group if form.axis == "token" else 0
        known = _known[pool] = codes, native.PackedPart(vars(codes), levels, form.bits, pool.dim, group)
    return known[1]


# By pool, the codes whose addresses are known.
_known: WeakKeyDictionary[BlockPool, tuple[Codes, native.PackedPart]] = WeakKeyDictionary()


@functools.cache  # For good: a recorded pass reads them where they lie.
def _levels(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """Levels of all codes, at least 16 of them: the kernel looks up whole vectors."""
    return torch.tensor([*levels, *[0.0] * (16 - len(levels))], device=device)


def _plain(query: Tensor, body: Body, terms: AttentionTerms | None) -> _Sums:
    """In plain torch, some blocks of all KV rows at a time."""
    block, rows = body.tokens, len(body.table)
    at_once = _AT_ONCE_ON_GPUS if query.is_cuda else _AT_ONCE
    step = max(1, at_once // (rows * block * max(body.keys.dim, body.values.dim)))
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
