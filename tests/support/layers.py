"""What a layer sees, made by hand, and what an evictor keeps of it."""

from __future__ import annotations

import torch

from kvsieve.types import LayerContext, Step


def context(
    query, keys, *, values=None, padding=None, scale=None, layer_idx=0, num_layers=4, shared=None
) -> LayerContext:
    """A one-shot prompt of N tokens; padding: left padding of each row."""
    batch, heads, length, dim = keys.shape
    padding = padding or [0] * batch
    valid = torch.arange(length) >= torch.tensor(padding)[:, None]
    lengths = tuple(length - pad for pad in padding)
    return LayerContext(
        layer_idx=layer_idx,
        num_layers=num_layers,
        step=Step(0, length, "prefill", True, 0, 0, lengths, lengths),
        scale=dim**-0.5 if scale is None else scale,
        query=query,
        keys=keys,
        values=keys if values is None else values,
        index=torch.arange(length, dtype=torch.int32).expand(batch, heads, length),
        valid=valid[:, None] if any(padding) else None,
        stored=lengths,
        offered=length,
        offered_counts=lengths,
        shared={} if shared is None else shared,
    )


def kept(evictor, ctx, row=0):
    counts = tuple(evictor.budget.entries(n, evictor.minimum) for n in ctx.step.lengths)
    selection = evictor.select(ctx, counts)
    real = selection.indices.shape[-1] if selection.lengths is None else selection.lengths[row]
    return selection.indices[row, ..., -real:].tolist()


def golden(shape, seed):
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return (((index * 2654435761 + seed * 40503 + 12345) % 2**32).double() / 2**31 - 1).view(shape)
