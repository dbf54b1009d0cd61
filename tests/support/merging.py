"""Evictors that keep given slots, contexts of random entries, and the naive nearest kept entry."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvsieve.methods.base import ScoredEvictor
from kvsieve.planning.budget import Budget
from layers import context


@dataclass(frozen=True, kw_only=True)
class Listed(ScoredEvictor, heads="own", query_aware=False):
    """Keeps the tokens at given positions of a row without padding."""

    budget: Budget = Budget(tokens=1)
    tokens: tuple = ()

    def scores(self, ctx):
        pad = torch.tensor([ctx.keys.shape[2] - length for length in ctx.step.lengths])[:, None, None]
        return torch.isin(ctx.index - pad, torch.tensor(self.tokens)).double()


def listed(*tokens):
    return Listed(budget=Budget(tokens=len(tokens)), tokens=tokens)


def entries(keys, values=None, **more):
    """A context of one row and one head with these keys, and queries of zeros."""
    keys = torch.as_tensor(keys, dtype=torch.float64)[None, None]
    values = keys if values is None else torch.as_tensor(values, dtype=torch.float64)[None, None]
    return context(torch.zeros_like(keys), keys, values=values, **more)


def drawn(padding=(0, 0), size=60, heads=2, groups=2, dim=8, seed=0):
    """A context of random entries; rows with padding have the last tokens of an unpadded row."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(count):
        return torch.randn(1, count, size, dim, generator=generator, dtype=torch.float64).expand(
            len(padding), -1, -1, -1
        )

    ctx = context(numbers(heads * groups), numbers(heads), values=numbers(heads), padding=list(padding))
    return ctx if any(padding) else replace(ctx, valid=None)


def chosen(evictor, ctx):
    return evictor.select(ctx, tuple(evictor.entries(length) for length in ctx.step.lengths))


def row_of(selection, row):
    """Slots, keys, values and log weights of a row's real entries."""
    count = selection.indices.shape[-1] if selection.lengths is None else selection.lengths[row]
    parts = (selection.indices, selection.keys, selection.values, selection.log_weight)
    return [None if part is None else part[row, :, -count:] for part in parts]


def naive(ctx, kept, *, open_, likeness="cosine"):
    """For each dropped real slot of row 0, head 0: the largest similarity with an open kept slot, and that slot."""
    keys = ctx.keys[0, 0]
    found = {}
    for slot in range(len(keys)):
        if slot in kept or (ctx.valid is not None and not ctx.valid[0, 0, slot]):
            continue
        products = [float(keys[slot] @ keys[other]) for other in open_]
        if likeness == "cosine":
            products = [
                product / float(keys[slot].norm() * keys[other].norm())
                for product, other in zip(products, open_, strict=True)
            ]
        best = max(range(len(open_)), key=lambda place: products[place])
        found[slot] = products[best], open_[best]
    return found
