"""Layers with given scores, what evictors keep of them and what a cache stores, and attention in plain loops."""

from __future__ import annotations

import dataclasses

import torch

import kvsieve
from kvsieve.methods.base import ScoredEvictor
from layers import context

F64 = torch.float64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given(ScoredEvictor):
    """Ranks by the scores that the test put into ``ctx.shared``."""

    def scores(self, ctx):
        return ctx.shared["scores"]


def given(scores, **options):
    """Return a layer with scores [B, H, N] for `Given`."""
    scores = torch.as_tensor(scores, dtype=F64)
    keys = torch.zeros(*scores.shape, 4, dtype=F64)
    return context(keys, keys, shared={"scores": scores}, **options)


def kept_slots(selection, row=0):
    """Return the kept slots of each head of a row."""
    real = selection.real()
    real = torch.ones_like(selection.indices, dtype=torch.bool) if real is None else real
    real = (real[:, None] if real.ndim == 2 else real).expand_as(selection.indices)
    return [slots[own].tolist() for slots, own in zip(selection.indices[row], real[row], strict=True)]


def columns(cache, row=0):
    """Return the stored columns per layer and head of a row."""
    out = []
    for layer in cache.layers:
        index = layer.store.index
        valid = layer.store.valid
        real = torch.ones_like(index, dtype=torch.bool) if valid is None else valid.expand_as(index).bool()
        out.append([sorted(slots[own].tolist()) for slots, own in zip(index[row], real[row], strict=True)])
    return out


def read(model, plan, ids, mask=None, **options):
    """Return a cache with a prompt, padding included."""
    with kvsieve.attach(model, plan) as sieve:
        return sieve.prefill(ids, torch.ones_like(ids) if mask is None else mask, **options)


def moved(columns, by):
    """Return columns [layers][heads] shifted."""
    return [[[column + by for column in head] for head in layer] for layer in columns]


def prompt(layers=3, heads=2, groups=2, length=40, batch=1, seed=0, dim=4):
    """Queries and keys per layer, the deeper ones more peaked."""
    make = torch.Generator().manual_seed(seed)
    return [
        tuple(
            (1 + layer) * torch.randn(batch, count, length, dim, generator=make, dtype=torch.float64)
            for count in (heads * groups, heads)
        )
        for layer in range(layers)
    ]


def run(evictor, parts, padding=None, protected=None, watch=None):
    """[layers][rows][heads] columns that stay, every layer holding what the evictor's answers leave of it."""
    held, shared = [], {}
    for index, (query, keys) in enumerate(parts):
        ctx = context(query, keys, padding=padding, layer_idx=index, num_layers=len(parts), shared=shared)
        ctx.protected = protected
        columns = ctx.index.long() if ctx.valid is None else ctx.index.long().masked_fill(~ctx.valid, -1)
        held.append(columns)
        counts = tuple(evictor.budget.entries(n, evictor.minimum) for n in ctx.step.lengths)
        answer = evictor.select(ctx, counts)
        for layer, selection in (answer if isinstance(answer, dict) else {index: answer}).items():
            if selection is not None:
                real = selection.real()
                copies = selection.indices.shape[1] // held[layer].shape[1]
                kept = held[layer].repeat_interleave(copies, 1).gather(-1, selection.indices)
                if real is not None:
                    kept = kept.masked_fill(~(real[:, None] if real.ndim == 2 else real), -1)
                held[layer] = kept
        if watch is not None:
            watch([(columns >= 0).sum((1, 2)).tolist() for columns in held])
    return [[[[c for c in head if c >= 0] for head in row] for row in layer.tolist()] for layer in held]


def sizes(kept, row=0):
    return [[len(head) for head in layer[row]] for layer in kept]


def weights(query, keys, window):
    """[Hq, W, N] causal softmax of the last queries, plain loops."""
    groups, length = query.shape[0] // keys.shape[0], keys.shape[1]
    out = torch.zeros(query.shape[0], window, length, dtype=torch.float64)
    for head in range(query.shape[0]):
        for w in range(window):
            seen = length - window + w + 1
            logits = keys[head // groups, :seen] @ query[head, length - window + w] * keys.shape[-1] ** -0.5
            out[head, w, :seen] = logits.softmax(0)
    return out


def pooled(line, kernel, kind):
    near = [line[max(0, j - kernel // 2) : j + kernel // 2 + 1] for j in range(len(line))]
    return [max(part) if kind == "max" else sum(part) / kernel for part in near]


def best(scores, count):
    return sorted(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count])
