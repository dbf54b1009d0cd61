"""Attention over entries of equal number per head: executors for one token, and for many."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kvsieve import kernels
from kvsieve.attention import causal, chunk
from kvsieve.attention.blocked import blocked_attention, single_query_attention
from kvsieve.attention.choice import LONG, faster_for_token, faster_here
from kvsieve.attention.chunk import chunk_attention, is_even
from kvsieve.attention.request import (
    AttentionRequest,
    DenseEntries,
    Executor,
    each_of,
    float_mask,
    why_not_learned,
    why_not_padded,
    why_not_plain,
    why_not_weighted,
)
from kvsieve.attention.slices import between
from kvsieve.kernels.cpu import prompt as few
from kvsieve.kernels.cpu import token as native
from kvsieve.types import AttentionQueries

# Tokens up to which products in C are faster than torch's kernel, whose calls and copies take longer.
_FEW = 32
# Elements of one boolean mask block; a prompt of any length needs no N x N mask.
_MASK_ELEMENTS = 1 << 25

_Request = AttentionRequest[DenseEntries, None]


def _why_not_triton(request: _Request) -> str | None:
    return kernels.why_not(request.asked.query, request.stored.keys, request.stored.values)


def _triton(request: _Request) -> Tensor:
    stored = request.stored
    length = None if stored.length is None else stored.length.count
    return kernels.decode_attention(
        request.asked, stored.keys, stored.values, length=length, valid=stored.valid, log_weight=stored.log_weight
    )


def _why_not_c(request: _Request) -> str | None:
    asked = request.asked
    stored = request.stored
    if (reason := why_not_plain(request)) is not None:
        return reason
    if stored.length is not None:
        return "the device alone knows the length"
    if asked.query.dtype == torch.float32 and _is_thin(request):
        return "products are faster here"
    rows = stored.keys.shape[0] * stored.keys.shape[1]
    return native.why_not(asked.query, stored.keys, stored.values, rows, stored.log_weight)


def _c(request: _Request) -> Tensor:
    asked = request.asked
    stored = request.stored
    return native.token_attention(
        asked.query, stored.keys, stored.values, scale=asked.scale, valid=stored.valid, log_weight=stored.log_weight
    )


def _why_not_beside_sinks(request: _Request) -> str | None:
    asked = request.asked
    stored = request.stored
    if asked.softcap is not None or asked.sinks is None:
        return "it is for sinks alone"
    if stored.valid is not None or stored.length is not None:
        return "entries are masked"
    if not is_even(asked.query, stored.values):
        return "it is for CPUs, and values as wide as keys"
    return "products are faster here" if _is_thin(request) else None


def _beside_sinks(request: _Request) -> Tensor:
    asked = _grouped(request)
    stored = request.stored
    return _by_head(request, chunk.token_attention(asked, stored.keys, stored.values))


def _why_not_products(request: _Request) -> str | None:
    return None if not request.asked.is_plain or _is_thin(request) else "torch's kernel is faster here"


def _products(request: _Request) -> Tensor:
    stored = request.stored
    weights = None if stored.log_weight is None else stored.log_weight[:, :, None]
    out = single_query_attention(_grouped(request), stored.keys, stored.values, _token_mask(stored), weights)
    return _by_head(request, out)


def _torch(request: _Request) -> Tensor:
    stored = request.stored
    asked = _grouped(request)
    mask = _token_mask(stored)
    if stored.log_weight is not None:
        mask = float_mask(stored.log_weight[:, :, None], mask, asked.query.dtype)
    return _by_head(
        request,
        F.scaled_dot_product_attention(asked.query, stored.keys, stored.values, attn_mask=mask, scale=asked.scale),
    )


def _is_thin(request: _Request) -> bool:
    """Return whether products are faster than torch's kernel for one token, or the only way."""
    stored = request.stored
    if stored.foreseen is not None:
        return stored.foreseen.thin
    length = stored.keys.shape[2]
    return faster_for_token(request.asked.query, length) or (length >= LONG and _uneven(stored))


def _uneven(stored: DenseEntries) -> bool:
    """Return whether torch's fused CPU kernel does not take them and would allocate N x N."""
    return stored.keys.device.type == "cpu" and stored.keys.shape[-1] != stored.values.shape[-1]


def _grouped(request: _Request) -> AttentionQueries:
    """Queries [B, H, G, D] of one token: those of a group are rows of one block, so keys are read once per KV head."""
    query = request.asked.query
    heads = request.stored.keys.shape[1]
    return request.asked.of(query.reshape(query.shape[0], heads, query.shape[1] // heads, query.shape[3]))


def _by_head(request: _Request, out: Tensor) -> Tensor:
    return out.reshape(*request.asked.query.shape[:2], 1, out.shape[-1])


def _token_mask(stored: DenseEntries) -> Tensor | None:
    """Return the mask of the entries a token sees, bool [B or 1, H or 1, 1, N]; None for all."""
    valid = stored.valid
    length = stored.length
    if length is not None:
        real = length.real(stored.keys.shape[2])[None, None, None]
        return real if valid is None else real & valid[:, :, None]
    if valid is None:
        return None
    mask = valid[:, :, None, :].clone()
    mask[..., -1] = True
    return mask


def _why_not_on_device(request: _Request) -> str | None:
    """Refuse a length that the device alone knows."""
    return None if request.stored.length is None else "the device alone knows the length"


def _why_not_few(request: _Request) -> str | None:
    return few.why_not_few(request.asked.query, request.stored.keys, request.stored.values, request.asked.scale)


def _few(request: _Request) -> Tensor:
    return few.few_attention(request.asked, request.stored.keys, request.stored.values)


FEW = Executor("C, few tokens", each_of(why_not_padded, why_not_learned, why_not_weighted, _why_not_few), _few)
TOKEN_KERNEL = Executor("C", _why_not_c, _c)
TOKEN = (
    Executor("Triton", _why_not_triton, _triton),
    FEW._replace(why_not=each_of(_why_not_on_device, FEW.why_not)),
    TOKEN_KERNEL,
    Executor("torch, beside sinks", each_of(_why_not_beside_sinks, why_not_weighted), _beside_sinks),
    Executor("products", _why_not_products, _products),
    Executor("torch", why_not_plain, _torch),
)


def _why_not_by_products(request: _Request) -> str | None:
    if not request.asked.is_plain:
        return None
    faster = faster_here(request.asked.query) or _uneven(request.stored)
    return why_not_learned(request) or (None if faster else "torch's kernel is faster here")


def _why_not_triton_few(request: _Request) -> str | None:
    reason = _why_not_triton(request) or why_not_learned(request)
    if reason is None and request.asked.query.shape[2] > kernels.FEW_TOKENS:
        reason = f"more than {kernels.FEW_TOKENS} tokens"
    return reason


def _why_not_on_host(request: _Request) -> str | None:
    return "the host knows the length" if request.stored.length is None else why_not_plain(request)


def _of_length(request: _Request) -> Tensor:
    """Attend to the entries up to each token's own, under a mask of all slots."""
    stored = request.stored
    assert stored.length is not None
    query_heads, new = request.asked.query.shape[1:3]
    mask = stored.length.shown(stored.keys.shape[2], new)[None, None]
    if stored.valid is not None:
        mask = mask & stored.valid[:, :, None].repeat_interleave(query_heads // stored.valid.shape[1], 1)
    return _sdpa(request, mask)


def _why_not_last(request: _Request) -> str | None:
    query = request.asked.query
    stored = request.stored
    if not 1 < query.shape[2] <= _FEW:
        return f"it is for up to {_FEW} tokens"
    if query.shape[2] == stored.keys.shape[2]:
        return "no entries were stored before"
    rows = stored.keys.shape[0] * stored.keys.shape[1]
    return why_not_plain(request) or native.why_not(query, stored.keys, stored.values, rows, stored.log_weight)


def _why_not_even(request: _Request) -> str | None:
    if request.asked.softcap is not None:
        return "logits are capped"
    return None if is_even(request.asked.query, request.stored.values) else "it is for CPUs, and values as wide as keys"


def _why_not_sinks(request: _Request) -> str | None:
    if request.asked.sinks is None:
        return "it is for sinks alone"
    return "products are faster here" if faster_here(request.asked.query) else None


def _why_not_first(request: _Request) -> str | None:
    return None if request.asked.query.shape[2] == request.stored.keys.shape[2] else "entries were stored before"


def _whole(request: _Request) -> Tensor:
    return _sdpa(request, None, is_causal=True)


def _why_not_aligned(request: _Request) -> str | None:
    query = request.asked.query
    return None if query.is_cuda and query.element_size() == 2 else "it is for GPUs, in 16 bits"


def _aligned(request: _Request) -> Tensor:
    """Flash attention aligns the causal mask to the last entry and needs none in memory."""
    new = request.asked.query.shape[2]
    return _sdpa(request, causal_lower_right(new, request.stored.keys.shape[2]))


def _masked(request: _Request) -> Tensor:
    query = request.asked.query
    valid = request.stored.valid
    (batch, query_heads, new, _), length = query.shape, request.stored.keys.shape[2]
    masks = 1 if valid is None and request.stored.log_weight is None else batch * query_heads
    block = max(16, min(1024, _MASK_ELEMENTS // (masks * length)))
    parts = []
    for first in range(0, new, block):
        last = min(first + block, new)
        seen = length - new + last
        own = torch.arange(length - new + first, seen, device=query.device)[:, None]
        slots = torch.arange(seen, device=query.device)
        mask = (slots <= own)[None, None]
        if valid is not None:
            real = valid[:, :, None, :seen].repeat_interleave(query_heads // valid.shape[1], 1)
            mask = (mask & real) | (slots == own)
        part: _Request = AttentionRequest(request.asked.of(query[:, :, first:last]), between(request.stored, 0, seen))
        parts.append(_sdpa(part, mask))
    return torch.cat(parts, 2)


def _sdpa(request: _Request, mask: Tensor | None, *, is_causal: bool = False) -> Tensor:
    """Let torch attend to all entries; mask: bool, as in `Shown`, given if entries have weights."""
    stored = request.stored
    asked = request.asked
    if stored.log_weight is not None:
        weights = stored.log_weight.repeat_interleave(asked.query.shape[1] // stored.keys.shape[1], 1)
        mask = float_mask(weights[:, :, None], mask, asked.query.dtype)
    return F.scaled_dot_product_attention(
        asked.query,
        stored.keys,
        stored.values,
        attn_mask=mask,
        is_causal=is_causal,
        scale=asked.scale,
        enable_gqa=asked.query.shape[1] > stored.keys.shape[1],
    )


def _why_not_rows(request: _Request) -> str | None:
    valid = request.stored.valid
    return None if valid is not None and valid.shape[1] == 1 else "no row has padding"


def _rows(request: _Request, attend: Callable[[_Request], Tensor]) -> Tensor:
    """Attend row by row over the real entries only: no masks, and padding costs nothing."""
    query = request.asked.query
    keys = request.stored.keys
    values = request.stored.values
    valid = request.stored.valid
    assert valid is not None
    batch, query_heads, new, _ = query.shape
    out = query.new_empty(batch, new, query_heads, values.shape[-1]).transpose(1, 2)
    reals = valid[:, 0]
    shown = valid[:, 0, -new:]
    # How many are real, and the first of them: read at once, since the host waits for it.
    facts = torch.stack([fact for part in (reals, shown) for fact in (part.sum(-1), part.to(torch.uint8).argmax(-1))])
    for row, (stored, first, fresh, begin) in enumerate(facts.T.tolist()):
        # Padding sees itself.
        out[row] = values[row, :, -new:].repeat_interleave(query_heads // keys.shape[1], 0)
        if not fresh:
            continue
        at = slice(begin, new) if begin + fresh == new else shown[row].nonzero()[:, 0]
        places = slice(first, None) if first + stored == keys.shape[2] else reals[row]
        weights = None if request.stored.log_weight is None else request.stored.log_weight[row, :, places][None]
        entries = DenseEntries(keys[row, :, places][None], values[row, :, places][None], log_weight=weights)
        out[row, :, at] = attend(AttentionRequest(request.asked.of(query[row, :, at][None]), entries))[0]
    return out


def prompt_rows(attend: Callable[[_Request], Tensor]) -> tuple[Executor, ...]:
    """Return the executors for many tokens; attend: computes the rows of a padded batch."""
    split = each_of(_why_not_even, why_not_padded, why_not_learned, why_not_weighted)
    whole = each_of(why_not_plain, why_not_padded, why_not_weighted)
    first = (
        Executor("Triton, few tokens", _why_not_triton_few, _triton),
        Executor("torch, under a length", _why_not_on_host, _of_length),
    )
    others = (
        Executor("row by row", _why_not_rows, lambda request: _rows(request, attend)),
        FEW,
        Executor("C, last tokens", each_of(why_not_padded, why_not_learned, _why_not_last), _c),
        Executor("torch, in two parts beside sinks", each_of(split, _why_not_sinks), chunk_attention),
        Executor("C", each_of(_why_not_by_products, why_not_weighted, causal.why_not_kernel), causal.kernel_attention),
        Executor("products", _why_not_by_products, blocked_attention),
        Executor("torch", each_of(whole, _why_not_first), _whole),
        Executor("torch, in two parts", split, chunk_attention),
        Executor("torch, aligned", each_of(whole, _why_not_aligned), _aligned),
        Executor("torch, masked", why_not_plain, _masked),
    )
    return *first, *(row._replace(why_not=each_of(_why_not_on_device, row.why_not)) for row in others)
