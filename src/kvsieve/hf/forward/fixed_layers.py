"""Attention of layers that no plan reduces: those with a window, and those that read the entries of another layer."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsieve.attention import dense_attention, window_attention
from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.cache.layer import SieveLayer, StoreLayer, WindowLayer
from kvsieve.hf.forward.request import Asked
from kvsieve.hf.forward.sparse_read import read_token

if TYPE_CHECKING:
    from kvsieve.hf.forward.session import Session


def attend_window(session: Session, layer: WindowLayer, asked: Asked, key: Tensor, value: Tensor) -> Tensor:
    """Store this pass's keys and values of a layer with a window, attend within it, and drop what has left it."""
    tokens, store = session.tokens, layer.store
    positions = tokens.positions(session.cache.conversation.mask)
    layer.holes |= tokens.narrowed
    store.append(key.detach(), value.detach(), positions, tokens.valid, tokens.counts, layer.room)
    return attend_stored_window(layer, asked)


def attend_stored_window(layer: WindowLayer, asked: Asked) -> Tensor:
    """Attention of the last tokens stored over what their window shows them."""
    store = layer.store
    valid = None if store.valid is None else store.valid[:, 0]
    keys, values, positions = store.keys, store.values, store.index[:, 0]
    return window_attention(
        asked.query, keys, values, positions, layer.window, scale=asked.scale, valid=valid, terms=asked.terms
    )


def attend_shared(session: Session, index: int, source: int, asked: Asked, key: Tensor) -> Tensor:
    """Attention of a layer over the entries of layer `source`, as they were when that one attended in this pass.

    Of a prompt, the model may run such layers on its last tokens only.

    key: the keys that the model gave the layer; told by identity to be those that the source layer stored.
    """
    lent, given = session.lent.get(source, (None, None))
    if lent is None or given is not key:
        raise UnsupportedModelError(
            f"layer {index} does not attend to the keys that layer {source} has stored in this pass: this way of "
            "sharing KV between layers is not supported"
        )
    if isinstance(lent, WindowLayer):
        return attend_stored_window(lent, asked)
    assert isinstance(lent, SieveLayer)
    if not session.reads_as_answer:
        store = lent.store
        return dense_attention(
            asked.query, store.keys, store.values, scale=asked.scale, valid=store.valid, terms=asked.terms
        )
    outs, new = [], asked.query.shape[2]
    for at in range(new):
        alone = replace(asked, query=asked.query[:, :, at : at + 1])
        layer = _without_last(lent, new - 1 - at)
        outs.append(read_token(session.plan.read, session.cache, layer, index, session.model.num_layers, alone))
    return outs[0] if new == 1 else torch.cat(outs, 2)


def lend(session: Session, index: int, layer: StoreLayer, key: Tensor, *, changes: bool) -> None:
    """Let other layers of this pass read what a layer has stored now.

    key: of this pass, as the model made it. changes: the layer drops entries before the pass ends.
    """
    if index in session.cache.producers:
        session.lent[index] = (layer.fork(share=True) if changes else layer), key


def _without_last(layer: SieveLayer, tokens: int) -> SieveLayer:
    """Return a layer as it was before its last tokens."""
    if tokens == 0:
        return layer
    before = copy.copy(layer)
    before.store = layer.store.share()
    before.store.size -= tokens * before.store.stride
    before.store.lengths = tuple(length - tokens for length in before.store.lengths)
    return before
