"""Attention of new tokens over entries with the older ones encoded; those of the new tokens are exact."""

from __future__ import annotations

import functools
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvsieve import kernels
from kvsieve.attention.join import Sums, joined
from kvsieve.attention.request import AttentionRequest, EncodedEntries, Executor
from kvsieve.cache.body import Body
from kvsieve.cache.packed import PackedStore
from kvsieve.cache.pool import BlockPool
from kvsieve.core.codes import Codes
from kvsieve.core.kv_rows import DeviceLength
from kvsieve.core.rotation import rotation
from kvsieve.core.softmax import cap
from kvsieve.kernels.cpu import packed as native
from kvsieve.kernels.inputs import PackedBlocks
from kvsieve.types import AttentionQueries

# Numbers that the plain path decodes at once: what caches hold; on GPUs in fewer launches.
_AT_ONCE = 1 << 20
_AT_ONCE_ON_GPUS = 1 << 22

# Exact entries that the kernel takes at a time where none are encoded.
_TOKENS = 128


_Request = AttentionRequest[EncodedEntries, None]


def _why_not_triton(request: _Request) -> str | None:
    query = request.asked.query
    store = request.stored.store
    if (reason := kernels.why_not(query)) is not None:
        return reason
    if query.dtype != store.dtype:
        return f"queries are in {query.dtype}, entries in {store.dtype}"
    if query.shape[2] > kernels.FEW_TOKENS:
        return f"more than {kernels.FEW_TOKENS} tokens"
    apart = any(part.form.apart for body in _bodies(store) for part in (body.keys, body.values))
    return "some numbers are kept apart" if apart else None


def _triton(request: _Request) -> Tensor:
    query = _rows(request)
    bodies = [_by_triton(query, body, request.asked) for body in _bodies(request.stored.store)]
    return _by_head(request, joined([_exact_by_triton(request), *bodies], _sinks(request)))


def _why_not_c(request: _Request) -> str | None:
    if request.stored.length is not None:
        return "the device alone knows the length"
    return native.reason() if request.asked.query.device.type == "cpu" else "it is for CPUs"


def _c(request: _Request) -> Tensor:
    """Attend in C; the products of bfloat16 queries are as in `native.AskedBlocks`."""
    asked = request.asked
    store = request.stored.store
    query = _rows(request)
    bodies = _bodies(store)
    narrow = asked.query.dtype == torch.bfloat16
    cap = asked.softcap
    real = None if store.exact.valid is None else store.exact.valid.expand(-1, store.heads, -1).flatten(0, 1)
    exact = native.AskedExact(query, store.exact.keys, store.exact.values, real, asked.query.shape[2])
    tokens = bodies[0].tokens if bodies else _TOKENS
    sinks = _sinks(request)
    if not bodies:
        return _by_head(request, native.attend(None, exact, tokens=tokens, cap=cap, sinks=sinks))
    if len(bodies) == 1 and not bodies[0].values.turns:
        encoded = _encoded(query, bodies[0], narrow)
        return _by_head(request, native.attend(encoded, exact, tokens=tokens, cap=cap, sinks=sinks))
    parts = [native.attend_in_parts(None, exact, tokens=tokens, cap=cap)]
    parts += [_body_by_c(query, body, narrow, cap) for body in bodies]
    return _by_head(request, joined(parts, sinks))


def _body_by_c(query: Tensor, body: Body, narrow: bool, cap: float | None) -> Sums:
    acc, top, total = native.attend_in_parts(_encoded(query, body, narrow), None, tokens=body.tokens, cap=cap)
    return _turned_back(acc, total, body.values), top, total


def _torch(request: _Request) -> Tensor:
    query = _rows(request)
    bodies = [_plain(query, body, request.asked) for body in _bodies(request.stored.store)]
    return _by_head(request, joined([_over_exact(query, request), *bodies], _sinks(request)))


def _bodies(store: PackedStore) -> list[Body]:
    return [body for body in store.bodies if body.width]


def _rows(request: _Request) -> Tensor:
    """Queries of each KV row, scaled: float32 [R, G * L, D]."""
    query = request.asked.query
    rows = len(request.asked.query) * request.stored.store.heads
    return query.reshape(rows, -1, query.shape[-1]).float() * request.asked.scale


def _sinks(request: _Request) -> Tensor | None:
    sinks, (batch, _, new, _) = request.asked.sinks, request.asked.query.shape
    if sinks is None:
        return None
    return sinks.float().view(request.stored.store.heads, -1).repeat(batch, 1).repeat_interleave(new, 1)


def _by_head(request: _Request, out: Tensor) -> Tensor:
    return out.reshape(*request.asked.query.shape[:3], -1).to(request.asked.query.dtype)


def _exact_by_triton(request: _Request) -> Sums:
    asked = request.asked
    exact = request.stored.store.exact
    new = asked.query.shape[2]
    query = asked.query.reshape(len(asked.query) * request.stored.store.heads, -1, new, asked.query.shape[-1])
    count = None if request.stored.length is None else request.stored.length.count
    alone = AttentionQueries(query, asked.scale, asked.softcap)
    found = kernels.exact_decode(alone, exact.keys, exact.values, length=count, valid=exact.valid)
    out, norm = (part.flatten(1, 2) for part in found)
    return out.float()[:, None], norm[:, None], torch.ones_like(norm)[:, None]


def _by_triton(query: Tensor, body: Body, asked: AttentionQueries) -> Sums:
    query, base = _turned(query, body.keys)
    keys, values = (_blocks(pool, query.device) for pool in (body.keys, body.values))
    out, norm = kernels.packed_decode(query, base, body.table, body.fills, keys, values, asked.softcap)
    total = torch.ones_like(norm)[:, None]
    return _turned_back(out[:, None], total, body.values), norm[:, None], total


def _blocks(pool: BlockPool, device: torch.device) -> PackedBlocks:
    codes = pool.codes
    form = pool.form
    assert codes is not None
    levels = None if form.levels is None else _levels(form.levels, device)
    group = form.group if form.axis == "token" else 0
    return PackedBlocks(codes.packed, codes.scale, codes.zero, levels, form.bits, pool.dim, group)


def _seen(store: PackedStore, length: DeviceLength | None = None) -> Tensor | None:
    """Mask of the exact entries that are seen, bool [R or 1, size]; None for all. length: as in packed_attention."""
    there = None if length is None else length.real(store.exact.size)[None]
    if store.exact.valid is None:
        return there
    real = store.exact.valid.expand(-1, store.heads, -1).flatten(0, 1)
    if there is not None:
        return real & there
    real = real.clone()
    # Padding sees itself.
    real[:, -1] = True
    return real


def _over_exact(query: Tensor, request: _Request) -> Sums:
    store = request.stored.store
    new = request.asked.query.shape[2]
    keys = store.exact.keys.flatten(0, 1)
    values = store.exact.values.flatten(0, 1)
    logits = cap(query @ keys.float().transpose(1, 2), request.asked)
    if new > 1:
        logits.unflatten(1, (-1, new)).masked_fill_(_hidden(store, new, request.stored.length), float("-inf"))
    elif (real := _seen(store, request.stored.length)) is not None:
        logits.masked_fill_(~real[:, None], float("-inf"))
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp()
    return (weights @ values.float())[:, None], top[..., 0][:, None], weights.sum(-1)[:, None]


def _hidden(store: PackedStore, new: int, length: DeviceLength | None) -> Tensor:
    """Return the exact entries that each of the last `new` tokens does not see, bool [R or 1, 1, new, size].

    length: exact entries, if the device alone knows them; no new token is padding then.
    """
    slots = torch.arange(store.exact.size, device=store.device)
    valid = store.exact.valid
    own = slots[-new:, None]
    hidden = (slots > own if length is None else ~length.shown(store.exact.size, new))[None, None]
    if valid is None:
        return hidden
    real = valid.expand(-1, store.heads, -1).flatten(0, 1)[:, None, None]
    return hidden | (~real & (slots != own)) if length is None else hidden | ~real


def _turned(query: Tensor, part: BlockPool) -> tuple[Tensor, Tensor | None]:
    """Return queries in the space of encoded keys, and the logit that the mean of the keys adds to all."""
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
    """Return the addresses of a pool, cached until its buffers change."""
    codes = pool.codes
    form = pool.form
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


def _plain(query: Tensor, body: Body, asked: AttentionQueries) -> Sums:
    """In plain torch, some blocks of all KV rows at a time."""
    block = body.tokens
    rows = len(body.table)
    at_once = _AT_ONCE_ON_GPUS if query.is_cuda else _AT_ONCE
    step = max(1, at_once // (rows * block * max(body.keys.dim, body.values.dim)))
    out = []
    for start in range(0, body.table.shape[1], step):
        table = body.table[:, start : start + step]
        fills = body.fills[:, start : start + step]
        numbers = torch.arange(rows, device=table.device).repeat_interleave(table.shape[1])
        keys, values = (part.blocks(table.flatten(), numbers) for part in (body.keys, body.values))
        logits = cap(query @ keys.view(rows, -1, keys.shape[-1]).transpose(1, 2), asked)
        real = torch.arange(block, device=table.device) < fills[..., None]
        logits.masked_fill_(~real.flatten(1)[:, None], float("-inf"))
        # A KV row with no entry here has no largest logit.
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top.clamp_min(torch.finfo(torch.float32).min)).exp()
        out.append((weights @ values.view(rows, -1, values.shape[-1]), top[..., 0], weights.sum(-1)))
    acc, top, total = (torch.stack([part[i] for part in out], 1) for i in range(3))
    return acc, top, total


# No decoded copy outlives a block.
ENCODED = (
    Executor("Triton", _why_not_triton, _triton),
    Executor("C", _why_not_c, _c),
    Executor("torch", lambda request: None, _torch),
)
