"""Attention of layers with a window."""

from __future__ import annotations

from torch import Tensor

from kvsieve.attention import AttentionRequest, DenseEntries, Near, attend
from kvsieve.hf.cache.layer import WindowLayer
from kvsieve.hf.forward.travel import Tokens
from kvsieve.types import AttentionQueries


def attend_window(
    layer: WindowLayer, asked: AttentionQueries, key: Tensor, value: Tensor, tokens: Tokens, mask: Tensor | None
) -> Tensor:
    """Store a pass's keys and values in a layer with a window, and attend within it.

    Args:
        layer: the layer.
        asked: the queries of `tokens`.
        key: [B, H, L, D].
        value: [B, H, L, Dv].
        tokens: those that reached the layer.
        mask: bool [B, columns], of all columns of the conversation; None while there is no padding.
    """
    layer.holes |= tokens.narrowed
    key = key.detach()
    value = value.detach()
    layer.store.append(key, value, tokens.positions(mask), tokens.valid, tokens.counts, layer.room)
    return attend_stored_window(layer, asked)


def attend_stored_window(layer: WindowLayer, asked: AttentionQueries) -> Tensor:
    """Attend with the last stored tokens within their window."""
    store = layer.store
    stored = DenseEntries(store.keys, store.values, store.valid, log_weight=store.log_weight)
    return attend(AttentionRequest(asked, stored, Near(layer.window, store.index[:, 0])))
