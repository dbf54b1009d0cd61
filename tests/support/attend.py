"""Requests for attention in one line, as tests make them; terms: a cap and sinks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvsieve import attention
from kvsieve.attention import (
    AttentionRequest,
    ChosenBlocks,
    DenseEntries,
    EncodedEntries,
    FlatEntries,
    Latents,
    Near,
    Shown,
)
from kvsieve.attention.request import Foreseen
from kvsieve.core import queries, scoring
from kvsieve.types import AttentionQueries


class AttentionTerms(NamedTuple):
    softcap: float | None = None
    sinks: Tensor | None = None

    def per_kv_row(self, batch, heads):
        return self if self.sinks is None else AttentionTerms(self.softcap, self.sinks.view(heads, -1).repeat(batch, 1))


def asking(query, scale, terms=None):
    return AttentionQueries(query, scale, *(terms or ()))


def by(name, request):
    """Let one executor compute a request."""
    (found,) = [each for each in attention.executors(request) if each.name == name]
    return found.run(request)


def dense_attention(query, keys, values, *, scale, valid=None, terms=None):
    return attention.attend(AttentionRequest(asking(query, scale, terms), DenseEntries(keys, values, valid)))


def masked_attention(query, keys, values, mask, *, scale, terms=None):
    return attention.attend(AttentionRequest(asking(query, scale, terms), DenseEntries(keys, values), Shown(mask)))


def window_attention(query, keys, values, positions, window, *, scale, valid=None, terms=None):
    stored = DenseEntries(keys, values, None if valid is None else valid[:, None])
    return attention.attend(AttentionRequest(asking(query, scale, terms), stored, Near(window, positions)))


def prompt_attention(query, keys, values, chosen, grid, *, scale, terms=None):
    sees = ChosenBlocks(chosen, grid)
    return attention.attend(AttentionRequest(asking(query, scale, terms), DenseEntries(keys, values), sees))


def ragged_attention(query, keys, values, bias, *, scale, threads=None, terms=None):
    foreseen = None if threads is None else Foreseen(threads, thin=False)
    return attention.attend(AttentionRequest(asking(query, scale, terms), FlatEntries(keys, values, bias, foreseen)))


def latent_attention(query, entries, up, *, scale, valid=None, terms=None):
    return attention.attend(AttentionRequest(asking(query, scale, terms), Latents(entries, up, valid)))


def packed_attention(query, store, *, scale, terms=None, kernel=None, length=None):
    """kernel: False for torch, True for C; None for the first that takes it."""
    request = AttentionRequest(asking(query, scale, terms), EncodedEntries(store, length))
    return attention.attend(request) if kernel is None else by("C" if kernel else "torch", request)


def sparse_attention(query, kv_rows, choice, *, scale, terms=None):
    return attention.attend(AttentionRequest(asking(query, scale, terms), kv_rows, choice))


def window_mass(query, keys, scale, *, terms=None, **options):
    return scoring.window_mass(asking(query, scale, terms), keys, **options)


def window_weights(query, keys, scale, *, terms=None, **options):
    return scoring.window_weights(asking(query, scale, terms), keys, **options)


def query_mass(query, keys, scale, visible, *, terms=None, **options):
    return queries.query_mass(asking(query, scale, terms), keys, visible, **options)
