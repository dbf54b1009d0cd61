"""Passes over several chunks of a prompt, with results equal, bit for bit, to one pass per chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import StoreLayer
from kvsieve.hf.forward.session import Session
from kvsieve.models.quantized import LINEARS, QuantizedEmbedding, QuantizedLinear, dtype_of
from kvsieve.planning.plans import Plan
from kvsieve.types import AttentionQueries

# Most chunks of a pass.
COUNTS = (1, 2, 4, 8)


def attend_by_chunk(
    session: Session, index: int, layer: StoreLayer, asked: AttentionQueries, key: Tensor, value: Tensor
) -> Tensor:
    """Store the chunks of a pass and attend to them one after another, as passes over each would.

    Args:
        session: the pass.
        index: index of the layer.
        layer: the layer's cache.
        asked: its queries.
        key: [B, H, L, D].
        value: [B, H, L, Dv].

    Returns:
        [B, Hq, L, Dv].
    """
    chunk = session.request.chunk
    whole = session.tokens
    if chunk is None or chunk >= whole.size:
        return session.attend(index, layer, asked, key, value)
    outs = []
    try:
        for first in range(0, whole.size, chunk):
            part = slice(first, first + chunk)
            session.tokens = whole.part(part)
            outs.append(session.attend(index, layer, asked.part(part), key[:, :, part], value[:, :, part]))
    finally:
        session.tokens = whole
    return torch.cat(outs, 2)


def joins_chunks(plan: Plan, cache: SieveCache, mask: Tensor | None) -> bool:
    """Return True if one pass over several leading chunks leaves the same state as one each.

    False for plans that act on or observe each chunk, with padding, and for layers with a state.
    """
    acts = plan.prefill is not None or plan.codec is not None or plan.probes or plan.when.chunks or plan.when.observes
    kinds = all(layer.memory is not None for layer in cache.all_layers)
    return kinds and not acts and not cache.producers and (mask is None or bool(mask.all()))


def rows_are_alone(decoder: nn.Module, chunk: int) -> bool:
    """Return True if a row's bits do not depend on the number of rows, as found by trial products of the model.

    True only if each part of `decoder` with weights is an embedding, a norm or a plain linear layer, and each of the
    latter, one per shape, gives the same results for several chunks of `chunk` rows as for each alone.
    """
    shapes: dict[Any, nn.Linear] = {}
    for module in decoder.modules():
        if type(module) in LINEARS:
            linear: nn.Linear = module  # type: ignore[assignment]
            size = linear.out_features, linear.in_features
            shapes.setdefault((size, type(linear), dtype_of(linear), linear.bias is None), linear)
            continue
        if isinstance(module, QuantizedEmbedding) or not any(True for _ in module.parameters(recurse=False)):
            continue
        if not (isinstance(module, nn.Embedding | nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")):
            return False
    return all(_same_rows(module, chunk) for module in shapes.values())


def _same_rows(module: nn.Linear, chunk: int) -> bool:
    device = torch.device("cpu") if isinstance(module, QuantizedLinear) else module.weight.device
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1, COUNTS[-1] * chunk, module.in_features, generator=draw).to(device, dtype_of(module))
    with torch.no_grad():
        alone = torch.cat([module(part) for part in rows.split(chunk, 1)], 1)
        return all(bool((module(rows[:, : n * chunk]) == alone[:, : n * chunk]).all()) for n in COUNTS[1:])
