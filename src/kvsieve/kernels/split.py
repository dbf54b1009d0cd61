"""Kernels of kernels.decode: attention over one part of a KV row, and the merge of a KV row's parts."""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments that change from step to step without recompilation.
_FREE = ["count", "capacity", "per", "kept", "apart", "entries_row", "body_row", "mask_row", "mask_head", "sink_rows"]


@triton.jit(do_not_specialize=_FREE)
def split_kernel(
    query,
    keys,
    values,
    out,
    norm,
    entries,
    body,
    tail,
    count_of,
    mask,
    sinks,
    scale,
    softcap,
    count,
    capacity,
    per,
    kept,
    stride,
    apart,
    key_row,
    key_head,
    key_slot,
    value_row,
    value_head,
    value_slot,
    entries_row,
    body_row,
    mask_row,
    mask_head,
    heads,
    sink_rows,
    COPIES: tl.constexpr,
    MASKS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LISTED: tl.constexpr,
    CHOSEN: tl.constexpr,
    TAIL: tl.constexpr,
    COUNT: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    FRESH: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    query_row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    owner = query_row // COPIES
    row = owner // heads
    head = owner % heads
    if COUNT:
        number = tl.load(count_of).to(tl.int32)
    else:
        number = count
    after = tl.load(tail + owner) if TAIL else owner * 0
    number = tl.minimum(number - ((COPIES - 1 - query_row % COPIES) * apart).to(tl.int32), capacity)
    first = part * per
    last = tl.minimum(first + per, number)

    group = tl.arange(0, PADDED_GROUPS)
    dim = tl.arange(0, PADDED_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    q = tl.load(
        query + query_row * (GROUPS * DIM) + group[:, None] * DIM + dim[None, :],
        mask=(group < GROUPS)[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    keys += row * key_row + head * key_head
    values += row * value_row + head * value_head
    greatest = tl.full([PADDED_GROUPS], float("-inf"), tl.float32)
    total = tl.full([PADDED_GROUPS], 0.0, tl.float32)
    sums = tl.full([PADDED_GROUPS, PADDED_VALUE_DIM], 0.0, tl.float32)
    for at in range(first, last, BLOCK):
        index = at + tl.arange(0, BLOCK)
        real = index < last
        slot = _slots(
            entries, query_row * entries_row, body, owner * body_row, index, real, after, kept, stride, CHOSEN, LISTED
        )
        k = tl.load(
            keys + slot[:, None] * key_slot + dim[None, :], mask=real[:, None] & (dim < DIM)[None, :], other=0.0
        )
        # In units of log 2.
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
        logits = capped(logits, softcap * 1.4426950408889634) if SOFTCAP else logits
        ends = number - FRESH + group % FRESH
        logits = _masked(
            logits, mask, row * mask_row, mask_head, head, group, slot, real, index, ends, MASKS, GROUPS, MASK, FRESH
        )
        higher = tl.maximum(greatest, tl.max(logits, 1))
        # A part without visible entries has no greatest logit.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - finite[:, None])
        shrink = tl.exp2(greatest - finite)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            values + slot[:, None] * value_slot + value_dim[None, :],
            mask=real[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        greatest = higher

    place = (query_row * tl.num_programs(1) + part) * GROUPS + group
    sink = query_row % sink_rows * GROUPS + group
    store_part(out, norm, place, value_dim, group < GROUPS, greatest, total, sums, sinks, sink, VALUE_DIM, SINKS)


@triton.jit
def capped(logits, softcap):
    """Return softcap * tanh(logits / softcap), in any unit that both share."""
    # exp of a large number is infinite, of one far below 0 it is 0: results 1 and -1.
    return softcap * (1.0 - 2.0 / (tl.exp(logits * (2.0 / softcap)) + 1.0))


@triton.jit
def beside(sink, greatest, total):
    """Return the share of the softmax without the sink: the rest is exp(greatest) times `total`."""
    over = tl.maximum(sink, greatest)
    rest = total * tl.exp(greatest - over)
    return rest / (rest + tl.exp(sink - over))


@triton.jit
def _slots(
    entries, entries_at, body, body_at, index, real, after, kept, stride, CHOSEN: tl.constexpr, LISTED: tl.constexpr
):
    """Return the slots of the entries at `index`; `after`: slot of entry `kept`, after the listed ones."""
    if CHOSEN:
        entry = tl.load(entries + entries_at + index, mask=real, other=0)
    else:
        entry = index.to(tl.int64)
    slot = after + (entry - kept) * stride
    if LISTED:
        listed = tl.load(body + body_at + entry, mask=real & (entry < kept), other=0)
        slot = tl.where(entry < kept, listed, slot)
    return slot


@triton.jit
def _masked(
    logits,
    mask,
    mask_at,
    mask_head,
    head,
    group,
    slot,
    real,
    index,
    ends,
    MASKS: tl.constexpr,
    GROUPS: tl.constexpr,
    MASK: tl.constexpr,
    FRESH: tl.constexpr,
):
    """Return logits in units of log 2 with the KV row's mask or bias; -inf for hidden entries.

    ends: each query's own entry, which a mask does not hide; later ones are those of later tokens.
    """
    shown = real[None, :]
    if FRESH > 1:
        shown = shown & (index[None, :] <= ends[:, None])
    if MASK == 1:
        stored = tl.load(mask + mask_at + head * mask_head + slot, mask=real, other=0)
        shown = shown & ((stored != 0)[None, :] | (index[None, :] == ends[:, None]))
    if MASK == 2:
        # Query heads that share an entry share its bias.
        shared = head * MASKS + group // (GROUPS // MASKS)
        bias = tl.load(
            mask + mask_at + shared[:, None] * mask_head + slot[None, :],
            mask=(group < GROUPS)[:, None] & real[None, :],
            other=0.0,
        )
        logits += bias.to(tl.float32) * 1.4426950408889634
    if MASK == 3:
        # Weights of entries, -inf for padding.
        weight = tl.load(mask + mask_at + head * mask_head + slot, mask=real, other=0.0)
        there = weight > float("-inf")
        shown = shown & (there[None, :] | (index[None, :] == ends[:, None]))
        logits += tl.where(there, weight, 0.0)[None, :] * 1.4426950408889634
    return tl.where(shown, logits, float("-inf"))


@triton.jit
def store_part(
    out,
    norm,
    place,
    value_dim,
    real,
    greatest,
    total,
    sums,
    sinks,
    sink,
    VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Write a part's output and log-sum-exp; a total of 0 means that the part had no visible entries.

    sinks: of KV rows with a single part; for several, the merge adds them.
    """
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    if SINKS:
        logit = tl.load(sinks + sink, mask=real, other=0.0).to(tl.float32)
        sums *= beside(logit, greatest * 0.6931471805599453, total)[:, None]
    log_sum = (greatest + tl.log2(divisor)) * 0.6931471805599453
    tl.store(norm + place, tl.where(some, log_sum, float("-inf")), mask=real)
    tl.store(
        out + place[:, None] * VALUE_DIM + value_dim[None, :],
        sums / divisor[:, None],
        mask=real[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["number", "sink_rows"])
def merge_kernel(
    parts,
    norms,
    out,
    norm,
    sinks,
    number,
    sink_rows,
    GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    query_row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    at = tl.arange(0, PADDED_PARTS)
    norms += query_row * number * GROUPS + group
    parts += (query_row * number * GROUPS + group) * VALUE_DIM
    log_sum = tl.load(norms + at * GROUPS, mask=at < number, other=float("-inf"))
    greatest = tl.max(log_sum, 0)
    finite = tl.where(greatest == float("-inf"), 0.0, greatest)
    total = tl.sum(tl.exp(log_sum - finite), 0)
    # Parts beyond a KV row's last entry are empty.
    used = tl.max(tl.where(log_sum > float("-inf"), at + 1, 0), 0)
    dim = tl.arange(0, PADDED_VALUE_DIM)
    sums = tl.full([PADDED_VALUE_DIM], 0.0, tl.float32)
    for first in range(0, used, BLOCK):
        some = first + tl.arange(0, BLOCK)
        weights = tl.exp(tl.load(norms + some * GROUPS, mask=some < used, other=float("-inf")) - finite)
        # The output of a part without visible entries does not count.
        part = tl.load(
            parts + some[:, None] * (GROUPS * VALUE_DIM) + dim[None, :],
            mask=(weights > 0)[:, None] & (dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        sums += tl.sum(weights[:, None] * part, 0)
    divisor = tl.where(total > 0, total, 1.0)
    place = query_row * GROUPS + group
    if SINKS:
        sink = tl.load(sinks + query_row % sink_rows * GROUPS + group).to(tl.float32)
        sums *= beside(sink, finite, total)
    tl.store(out + place * VALUE_DIM + dim, sums / divisor, mask=dim < VALUE_DIM)
    tl.store(norm + place, tl.where(total > 0, finite + tl.log(divisor), float("-inf")))
