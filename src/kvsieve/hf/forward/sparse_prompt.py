"""Attention of prompts under a plan with sparse prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsieve.attention import AttentionRequest, ChosenBlocks, DenseEntries, LatentQueries, Latents, attend, explain
from kvsieve.attention.slices import real_entries
from kvsieve.cache import LayerMemory
from kvsieve.core.blocks import BlockGrid, PromptContext
from kvsieve.core.checks import tell
from kvsieve.core.softmax import cap
from kvsieve.errors import PlanError
from kvsieve.hf.cache.counts import PromptBlocks
from kvsieve.hf.cache.records import ParallelDocuments, Turn
from kvsieve.hf.forward.parallel import request_over
from kvsieve.planning.roles import SparsePrefill
from kvsieve.types import AttentionQueries, Step

# One query in so many is sampled to estimate the recall.
_SAMPLED = 1024


def attend_stored(
    role: SparsePrefill | None,
    turn: Turn,
    step: Step,
    where: tuple[int, int],
    asked: AttentionQueries,
    store: LayerMemory,
    shared: dict[Any, Any],
    documents: ParallelDocuments | None = None,
) -> Tensor:
    """Attend to everything stored, the pass's tokens included, or to a role's choice of it.

    Rows with padding, and heads with different numbers of entries, are processed separately, over their real entries,
    so that their choice is the same as alone.

    Args:
        role: chooses during prefill of a prompt that the plan acts on; None for a plan without.
        turn: its record counts computed and skipped blocks.
        step: the pass.
        where: index of the layer, and layers of the model.
        asked: the queries.
        store: of the layer, including the queries' own entries.
        shared: scratch of the pass.
        documents: in parallel, which no role chooses from; None for none.

    Returns:
        [B, Hq, L, Dv].
    """
    record = turn.record.blocks
    if documents is not None:
        return _noted(record, where[0], request_over(documents, asked, store))
    new = asked.query.shape[2]
    if role is None or not turn.acts or step.phase != "prefill":
        return _densely(record, where[0], asked, store)
    length = store.size if store.valid is None else max(store.lengths)
    # The role knows no weights, which later turns may meet.
    few = length < role.least or new < role.queries or store.log_weight is not None
    if few or not role.acts_in(*where):
        _count(record, None, BlockGrid(new, length, role.queries, role.block), asked.query)
        return _densely(record, where[0], asked, store)
    keys = store.keys
    values = store.values
    if store.valid is None:
        return _sparsely(role, (*where, step.is_last_chunk), asked, keys, values, record, shared)
    groups = asked.query.shape[1] // keys.shape[1]
    ended = (*where, step.is_last_chunk)
    # Padding sees itself.
    out = values[:, :, -new:].repeat_interleave(groups, 1)
    for row, heads, real in _parts(store.valid, keys.shape[1]):
        fresh = real[-new:]
        if not bool(fresh.any()):
            continue
        query_heads = slice(heads.start * groups, heads.stop * groups)
        part = asked.heads(query_heads).of(real_entries(asked.query[row, query_heads], fresh)[None])
        stored_keys, worth = (real_entries(tensor[row, heads], real)[None] for tensor in (keys, values))
        own = shared.setdefault(("prefill", row, heads.start), {})
        attended = _sparsely(role, ended, part, stored_keys, worth, record, own)[0]
        out[row, query_heads, fresh.nonzero()[:, 0]] = attended
    return out


def _densely(record: PromptBlocks, index: int, asked: AttentionQueries, store: LayerMemory) -> Tensor:
    """Attend to all entries of a layer."""
    request: AttentionRequest[Any, None]
    if not isinstance(asked, LatentQueries):
        stored = DenseEntries(store.keys, store.values, store.valid, log_weight=store.log_weight)
        request = AttentionRequest(asked, stored)
    elif store.size == asked.keys.shape[2]:
        # Nothing was stored before: the model has expanded all entries.
        request = AttentionRequest(asked, DenseEntries(asked.keys, asked.values, store.valid))
    else:
        request = AttentionRequest(asked, Latents(store.keys, asked.up, store.valid))
    return _noted(record, index, request)


def _noted(record: PromptBlocks, index: int, request: AttentionRequest[Any, Any]) -> Tensor:
    """Attend, and record the executor, once per layer."""
    if index not in record.executors:
        record.executors[index] = explain(request)
    return attend(request)


def _parts(valid: Tensor, heads: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield rows of bool [B, H or 1, N], or their heads if these differ, with their real entries."""
    for row, mask in enumerate(valid):
        for head, real in enumerate(mask):
            yield row, slice(0, heads) if len(mask) == 1 else slice(head, head + 1), real


def _sparsely(
    role: SparsePrefill,
    where: tuple[int, int, bool],
    asked: AttentionQueries,
    keys: Tensor,
    values: Tensor,
    record: PromptBlocks,
    shared: dict[Any, Any],
) -> Tensor:
    """Attend to real entries in chosen blocks, or to all if they are too few."""
    query = asked.query.detach()
    batch, query_heads, new, _ = query.shape
    heads, length = keys.shape[1:3]
    grid = BlockGrid(new, length, role.queries, role.block)
    if length < role.least or new < role.queries:
        _count(record, None, grid, query)
        return _noted(record, where[0], AttentionRequest(asked, DenseEntries(keys, values)))
    chosen = role.select(PromptContext(*where[:2], asked.of(query), keys, grid, bool(where[2]), shared))
    sets = chosen.shape[1:2]
    blocks = (grid.query_blocks, grid.key_blocks)
    if chosen.shape != (batch, *sets, *blocks) or sets[0] not in (heads, query_heads):
        raise PlanError(
            f"{type(role).__name__}.select gave a mask of shape {tuple(chosen.shape)}, expected [{batch}, {heads} or "
            f"{query_heads}, {blocks[0]}, {blocks[1]}]"
        )
    chosen = (chosen | grid.diagonal(chosen.device)) & grid.visible(chosen.device)
    _count(record, chosen, grid, query)
    recalled = _sampled_recall(asked, keys, chosen, grid)
    record.sampled += recalled.numel()
    tell(recalled.sum(), record.add_recall)
    return _noted(
        record, where[0], AttentionRequest(asked, DenseEntries(keys, values), ChosenBlocks(chosen, grid, role.shared))
    )


def _count(record: PromptBlocks, chosen: Tensor | None, grid: BlockGrid, query: Tensor) -> None:
    """Count computed blocks (None for all) and causal blocks."""
    batch, query_heads = query.shape[:2]
    causal = grid.pairs * batch * query_heads
    record.causal += causal
    if chosen is None:
        record.computed += causal
    else:
        tell(chosen.sum() * (query_heads // chosen.shape[1]), record.add_computed)


def _sampled_recall(asked: AttentionQueries, keys: Tensor, chosen: Tensor, grid: BlockGrid) -> Tensor:
    """Return the share of attention in the chosen blocks, for one query in `_SAMPLED`: [B, Hq, samples]."""
    batch, query_heads = asked.query.shape[:2]
    heads = keys.shape[1]
    at = torch.arange(min(_SAMPLED, grid.new) // 2, grid.new, _SAMPLED, device=keys.device)
    logits = asked.query[:, :, at].reshape(batch, heads, -1, keys.shape[-1]).float() @ keys.float().transpose(2, 3)
    logits = cap(logits * asked.scale, asked).view(batch, query_heads, len(at), -1)
    places = torch.arange(grid.length, device=keys.device)
    logits.masked_fill_(places > (grid.length - grid.new + at)[:, None], float("-inf"))
    weights = pad(logits.softmax(-1), (grid.pad, grid.key_blocks * grid.block - grid.pad - grid.length))
    blocks = chosen.repeat_interleave(query_heads // chosen.shape[1], 1)[:, :, at // grid.queries]
    return (weights.unflatten(-1, (-1, grid.block)).sum(-1) * blocks).sum(-1)
