"""Attention of layers that share the entries of another layer."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.cache.layer import SieveLayer, WindowLayer
from kvsieve.hf.forward.session import Session
from kvsieve.hf.forward.sparse_prompt import attend_stored
from kvsieve.hf.forward.sparse_read import read_token
from kvsieve.hf.forward.transaction import AnswerSession
from kvsieve.hf.forward.windows import attend_stored_window
from kvsieve.types import AttentionQueries


def attend_shared(session: Session, index: int, source: int, asked: AttentionQueries, key: Tensor) -> Tensor:
    """Attend to the entries of layer `source`, as they were at its attention in this pass.

    The model may run such layers on a prompt's last tokens only.

    key: the layer's keys from the model; their identity shows that the source layer stored them.
    """
    lent, lent_key = session.lent.get(source, (None, None))
    if lent is None or lent_key is not key:
        raise UnsupportedModelError(
            f"layer {index} does not attend to the keys that layer {source} has stored in this pass: this way of "
            "sharing KV between layers is not supported"
        )
    if isinstance(lent, WindowLayer):
        return attend_stored_window(lent, asked)
    assert isinstance(lent, SieveLayer)
    if isinstance(session, AnswerSession):
        return _of_answer(session, index, source, asked)
    if not session.reads_as_answer:
        where = index, session.model.num_layers
        plan = session.plan
        return attend_stored(plan.prefill, session.cache.turn, session.step, where, asked, lent.store, session.shared)
    outs = []
    new = asked.query.shape[2]
    arguments = index, session.model.num_layers, session.reads
    for at in range(new):
        alone = asked.part(slice(at, at + 1))
        outs.append(read_token(session.plan.read, session.cache, _without_last(lent, new - 1 - at), *arguments, alone))
    return outs[0] if new == 1 else torch.cat(outs, 2)


def _without_last(layer: SieveLayer, tokens: int) -> SieveLayer:
    """Return a layer as it was before its last tokens."""
    if tokens == 0:
        return layer
    before = copy.copy(layer)
    before.store = layer.store.share()
    before.store.drop_last([tokens] * len(before.store.lengths))
    return before


def _of_answer(session: AnswerSession, index: int, source: int, asked: AttentionQueries) -> Tensor:
    """Attend with several tokens of an answer: each sees the entries that existed at its turn."""
    outs = []
    for part in session.parts.taken[source]:
        lent, _ = part.lent[source]
        assert isinstance(lent, SieveLayer)
        outs.append(part.read(index, lent, asked.part(part.columns)))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)
