"""Attention of one new token over KV rows: all of their entries, or those that a reader has chosen.

The chosen keys and values are copied first, where no kernel reads them in place.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kvsieve import kernels
from kvsieve.attention.blocked import single_query_attention
from kvsieve.attention.request import AttentionRequest, Executor, float_mask, why_not_plain
from kvsieve.core.kv_rows import Choice, KVRows
from kvsieve.core.scoring import score_dtype
from kvsieve.core.softmax import cap

_Request = AttentionRequest[KVRows, Choice | None]


def _why_not_triton(request: _Request) -> str | None:
    if not request.stored.in_buffers:
        return "entries are encoded"
    if request.stored.log_weight is not None:
        return "entries have weights"
    return _why_not_products(request) or kernels.why_not(request.asked.query)


def _triton(request: _Request) -> Tensor:
    entries = None if request.sees is None else request.sees.entries
    return _blended(kernels.kv_row_attention(request.asked, request.stored, entries), request)


def _torch(request: _Request) -> Tensor:
    query, keys, values, real, weights = _read(request)
    mask = real if weights is None else float_mask(weights, real, query.dtype)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=request.asked.scale)
    return _blended(out.reshape(*request.asked.query.shape[:2], -1), request)


def _products(request: _Request) -> Tensor:
    query, keys, values, real, weights = _read(request)
    out = single_query_attention(request.asked.of(query), keys, values, real, weights)
    return _blended(out.reshape(*request.asked.query.shape[:2], -1), request)


def _read(request: _Request) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries [X, 1, G, D] and entries [X, 1, k, D], or [X, G, 1, D] and [X, G, k, D], for a set per query head.

    With a length that the device knows, all entries there can be, and which of them are there, bool [1, N]. At last the
    logarithms of weights, of the logits' dimensions; None if all weigh 1.
    """
    query = request.asked.query
    kv_rows = request.stored
    choice = request.sees
    entries = kv_rows.span(0, kv_rows.size) if choice is None else choice.entries
    real = kv_rows.length.real(kv_rows.size)[None] if choice is None and kv_rows.length is not None else None
    keys, values = kv_rows.read(entries)
    weights = kv_rows.log_weights_at(entries)
    weights = None if weights is None else weights[..., None, :]
    if entries.ndim == 2:
        return query[:, None], keys[:, None], values[:, None], real, None if weights is None else weights[:, None]
    return query[:, :, None], keys, values, real, weights


def _blends_beside_sinks(request: _Request) -> bool:
    return request.sees is not None and request.sees.blend is not None and request.asked.sinks is not None


def _why_not_blended_beside_sinks(request: _Request) -> str | None:
    return None if _blends_beside_sinks(request) else "nothing is blended in beside sinks"


def _why_not_products(request: _Request) -> str | None:
    return "something is blended in beside sinks" if _blends_beside_sinks(request) else None


def _blended_beside_sinks(request: _Request) -> Tensor:
    """Blend entries and vector, and give sinks the share that they have beside all entries.

    The chosen entries hold `weight` of the attention to all.
    """
    asked = request.asked
    choice = request.sees
    assert choice is not None and choice.blend is not None and asked.sinks is not None
    query, keys, values, _, weights = _read(request)
    shape = asked.query.shape[:2]
    dtype = score_dtype(query.dtype)
    logits = cap(query.to(dtype) @ keys.to(dtype).transpose(2, 3) * asked.scale, asked)
    if weights is not None:
        logits = logits + weights.to(dtype)
    out = (logits.softmax(-1).to(values.dtype) @ values).reshape(*shape, -1)
    norm = logits.logsumexp(-1).reshape(shape) - choice.blend[0].log()
    return (_blend(out, choice.blend) * (norm - asked.sinks).sigmoid()[..., None]).to(query.dtype)


def _blended(out: Tensor, request: _Request) -> Tensor:
    choice = request.sees
    return out if choice is None or choice.blend is None else _blend(out, choice.blend).to(request.asked.query.dtype)


def _blend(out: Tensor, blend: tuple[Tensor, Tensor]) -> Tensor:
    weight, vector = blend
    weight = weight[..., None]
    return weight * out + (1 - weight) * vector[:, None]


KV_ROWS = (
    Executor("torch, blended beside sinks", _why_not_blended_beside_sinks, _blended_beside_sinks),
    Executor("Triton", _why_not_triton, _triton),
    Executor("torch", why_not_plain, _torch),
    Executor("products", _why_not_products, _products),
)
