"""Attention of new tokens, split along the entries and merged by log-sum-exp.

One kernel serves dense stores, heads with different numbers of entries, views, and entries chosen by a reader. It works
on KV rows (core.kv_rows): a KV head of a batch row with its G query heads or, where heads share a flat buffer, a batch
row with all of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.kernels.inputs import Queries, StoredRows
from kvsieve.kernels.launch import PER_SM, cdiv, fitting, multiprocessors, on, padded, power_of_two, precision, rows
from kvsieve.kernels.split import merge_kernel, split_kernel

# Entries a program reads at a time: 64 keys and values of 128 bfloat16 channels are 32 KiB, of which two or three
# stages are in flight; two such programs keep a multiprocessor's share of 4.8 TB/s (about 36 KiB per us) covered.
_BYTES = 32 << 10
# Queries of a tile, unless a single token has more.
_ROWS = 64
# Parts of a KV row that are merged at a time.
_MERGED = 32


@dataclass(frozen=True)
class Entries:
    """Entries of KV rows to read, and their slots.

    Attributes:
        count: entries of each KV row, an int or one integer on the device.
        capacity: upper bound of `count`.
        chosen: int64 [X, count], indices of the chosen entries; None for the first `count`.
        body: as in `core.kv_rows.KVRows`; None if no slots are listed.
        tail: as in `core.kv_rows.KVRows`; None for 0.
        stride: slots from one entry to the next.
        apart: entries that each query row of a KV row sees more than the one before it; the last sees all.
        fresh: tokens whose queries are side by side in a query row, those of a head one after another; each sees the
            entries up to its own, the last ones.
    """

    count: Tensor | int
    capacity: int
    chosen: Tensor | None = None
    body: Tensor | None = None
    tail: Tensor | None = None
    stride: int = 1
    apart: int = 0
    fresh: int = 1


def decode_attention(
    asked: Queries,
    keys: Tensor,
    values: Tensor,
    *,
    length: Tensor | int | None = None,
    valid: Tensor | None = None,
    log_weight: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last L of the first `length` of N stored entries; each sees itself, padding or not.

    Args:
        asked: queries [B, Hq, L, D].
        keys: [B, H, N, D], possibly a view of a larger buffer.
        values: [B, H, N, Dv], possibly a view of a larger buffer.
        length: entries, an int or one integer on the device; None for N.
        valid: bool [B, H or 1, N], False for padding; None if there is none.
        log_weight: float32 [B, H, N], added to the logits; None for nothing.

    Returns:
        [B, Hq, L, Dv].
    """
    batch, heads, capacity, dim = keys.shape
    query_heads, new = asked.query.shape[1:3]
    entries = Entries(capacity if length is None else length, capacity)
    grouped = asked.query.reshape(batch * heads, query_heads // heads, new, dim)
    if log_weight is not None and valid is not None:
        log_weight = log_weight.masked_fill(~valid, float("-inf"))
    out, _ = causal(asked, grouped, keys, values, entries, valid if log_weight is None else log_weight)
    return out.view(batch, query_heads, new, -1)


def causal(
    asked: Queries, query: Tensor, keys: Tensor, values: Tensor, entries: Entries, shown: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the attention of the last L entries' queries [B * H, G, L, D], and the logits' log-sum-exp; see `attend`.

    A program takes the queries of as many tokens as a tile has rows for.

    shown: bool [B, H or 1, N], False for padding, which sees itself; or float32, added to the logits, -inf for padding;
    None if there is none.

    Returns:
        Output [B * H, G, L, Dv] and log-sum-exp float32 [B * H, G, L].
    """
    mask = None if shown is None else shown.expand(-1, keys.shape[1], -1)
    rows, groups, new, dim = query.shape
    copies = cdiv(groups * new, _ROWS)
    fresh = cdiv(new, copies)
    copies = cdiv(new, fresh)
    more = copies * fresh - new
    if more:
        # In front, where the outputs of tokens that are none are left out.
        query = torch.nn.functional.pad(query, (0, 0, more, 0))
    tiles = query.unflatten(2, (copies, fresh)).transpose(1, 2).reshape(rows * copies, groups * fresh, dim)
    entries = dataclasses.replace(entries, fresh=fresh, apart=fresh)
    out, norm = attend(asked, tiles, keys, values, entries, mask=mask, sees_itself=True)
    out = out.view(rows, copies, groups, fresh, -1).transpose(1, 2).flatten(2, 3)[:, :, more:]
    return out, norm.view(rows, copies, groups, fresh).transpose(1, 2).flatten(2, 3)[:, :, more:]


def ragged_decode(asked: Queries, keys: Tensor, values: Tensor, bias: Tensor, used: int | None = None) -> Tensor:
    """Attention of every KV head's queries over a flat buffer shared by all heads.

    A tile of entries is read once for all heads, so heads with
    different numbers of entries are equal shares of work.

    Args:
        asked: queries [B, Hq, L, D].
        keys: [B, T, D].
        values: [B, T, Dv].
        bias: [B, H, T], added to a head's logits.
        used: slots in use; the last L * H are those of the L tokens. None for T, if L is 1.

    Returns:
        [B, Hq, L, Dv].
    """
    batch, query_heads, new, dim = asked.query.shape
    used = keys.shape[1] if used is None else used
    query = asked.query.transpose(1, 2).reshape(batch * new, query_heads, dim)
    everything = Entries(used, used, apart=bias.shape[1])
    out, _ = attend(asked, query, keys[:, None], values[:, None], everything, mask=bias)
    return out.view(batch, new, query_heads, -1).transpose(1, 2)


def kv_row_attention(asked: Queries, kv_rows: StoredRows, chosen: Tensor | None = None) -> Tensor:
    """Attention over chosen entries of KV rows, or over all of them.

    Args:
        asked: queries [X, G, D], and sinks of this shape.
        kv_rows: X of them, the length on the device or not.
        chosen: int64 [X, k], or [X, G, k] for a choice per query head, indices in the KV row; None for all entries.

    Returns:
        [X, G, Dv].
    """
    query = asked.query
    query_rows, groups, _ = query.shape
    count: Tensor | int = kv_rows.size if kv_rows.length is None else kv_rows.length.count
    capacity = kv_rows.size
    if chosen is not None:
        count = capacity = chosen.shape[-1]
        if chosen.ndim == 3:
            query = query.reshape(query_rows * groups, 1, -1)
            chosen = chosen.flatten(0, 1)
    keys, values = (part.expand(query_rows, 1, -1, -1) for part in (kv_rows.keys, kv_rows.values))
    entries = Entries(count, capacity, chosen, kv_rows.body, kv_rows.tail, kv_rows.stride)
    out, _ = attend(asked, query, keys, values, entries)
    return out.view(query_rows, groups, -1)


def attend(
    asked: Queries,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    entries: Entries,
    *,
    mask: Tensor | None = None,
    sees_itself: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the attention of [X, G, D] over keys [B, H, N, D], and the logits' log-sum-exp; all variants call it.

    X is a multiple of B * H; query rows that share a KV row follow each other.

    Args:
        asked: queries; X * G sinks, or a divisor of that, repeated; with `apart`, those of all heads for one token.
        query: those of `asked`, [X, G, D].
        keys: [B, H, N, D].
        values: [B, H, N, Dv].
        entries: entries to read.
        mask: by slot: bool [B, H, N], except that the last entry is always visible, or a bias of the logits, [B, H or a
            multiple, N]; None for none.
        sees_itself: a query's own entry is visible where a bias is -inf, without one, as it is under a bool mask.

    Returns:
        Output [X, G, Dv] and log-sum-exp float32 [X, G], without sinks.
    """
    query_rows, groups, dim = query.shape
    value_dim = values.shape[-1]
    capacity = entries.capacity
    query = query.contiguous()
    keys = rows(keys)
    values = rows(values)
    if mask is not None:
        mask = rows(mask.view(torch.uint8) if mask.dtype == torch.bool else mask)
    block = fitting(_BYTES, (padded(dim) + padded(value_dim)) * keys.element_size(), 128)
    share = cdiv(query_rows * capacity, PER_SM * multiprocessors(query.device))
    per = cdiv(share, block) * block
    parts = cdiv(capacity, per)
    out = query.new_empty(query_rows, groups, value_dim)
    norm = query.new_empty(query_rows, groups, dtype=torch.float32)
    sinks = None if asked.sinks is None else asked.sinks.contiguous()
    if sinks is not None and entries.apart:
        copies = query_rows // (keys.shape[0] * keys.shape[1])
        sinks = sinks.view(keys.shape[1], 1, -1, 1).expand(-1, copies, -1, entries.fresh).flatten()
    sink_rows = 1 if sinks is None else sinks.numel() // groups
    split = _Split(per, block, out, norm, asked.softcap, sinks if parts == 1 else None, sees_itself)
    if parts > 1:
        of_parts = query.new_empty(query_rows, parts, groups, value_dim, dtype=torch.float32)
        of_norms = query.new_empty(query_rows, parts, groups, dtype=torch.float32)
        split = dataclasses.replace(split, out=of_parts, norm=of_norms)
    with on(query):
        _launch(split, query, keys, values, entries, asked.scale, mask)
        if parts > 1:
            merge_kernel[query_rows, groups](
                split.out,
                split.norm,
                out,
                norm,
                sinks,
                parts,
                sink_rows,
                GROUPS=groups,
                VALUE_DIM=value_dim,
                SINKS=sinks is not None,
                PADDED_PARTS=power_of_two(parts),
                PADDED_VALUE_DIM=padded(value_dim),
                BLOCK=_MERGED,
                num_warps=4,
            )
    return out, norm


@dataclass(frozen=True)
class _Split:
    """KV rows in parts of `per` entries, read `block` at a time; out and norm: outputs, by part if several.

    softcap: of the logits. sinks: added to the softmax of a KV row with a single part. sees_itself: as in `attend`.
    """

    per: int
    block: int
    out: Tensor
    norm: Tensor
    softcap: float | None
    sinks: Tensor | None
    sees_itself: bool


def _launch(
    split: _Split, query: Tensor, keys: Tensor, values: Tensor, entries: Entries, scale: float, mask: Tensor | None
) -> None:
    """Attend in each part of each KV row; parameters as prepared by `attend`."""
    query_rows, groups, dim = query.shape
    batch, heads, value_dim = *keys.shape[:2], values.shape[-1]
    chosen = entries.chosen
    body = entries.body
    count = entries.count
    on_device = isinstance(count, Tensor)
    softcap = split.softcap
    sinks = split.sinks
    split_kernel[query_rows, cdiv(entries.capacity, split.per)](
        query,
        keys,
        values,
        split.out,
        split.norm,
        chosen,
        body,
        entries.tail,
        count if on_device else None,
        mask,
        sinks,
        float(scale),
        1.0 if softcap is None else float(softcap),
        0 if on_device else count,
        entries.capacity,
        split.per,
        0 if body is None else body.shape[1],
        entries.stride,
        entries.apart,
        *keys.stride()[:3],
        *values.stride()[:3],
        0 if chosen is None else chosen.stride(0),
        0 if body is None else body.stride(0),
        *((0, 0) if mask is None else mask.stride()[:2]),
        heads,
        1 if sinks is None else sinks.numel() // groups,
        COPIES=query_rows // (batch * heads),
        MASKS=1 if mask is None else mask.shape[1] // heads,
        GROUPS=groups,
        DIM=dim,
        VALUE_DIM=value_dim,
        LISTED=body is not None,
        CHOSEN=chosen is not None,
        TAIL=entries.tail is not None,
        COUNT=on_device,
        MASK=0 if mask is None else 1 if mask.dtype == torch.uint8 else 3 if split.sees_itself else 2,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        FRESH=entries.fresh,
        PADDED_GROUPS=padded(groups),
        PADDED_DIM=padded(dim),
        PADDED_VALUE_DIM=padded(value_dim),
        BLOCK=split.block,
        PRECISION=precision(query.dtype),
        num_warps=4 if groups <= 32 else 8,
        num_stages=3,
    )
