"""Chunked compression: prompts compressed during prefill, each chunk guided by the question at the end.

Kept entries move: after each chunk the question's entries are dropped, and kept keys are re-rotated to the positions 0,
1, ... (roles.ChunkedEvictor). The cache then has a short prompt, to which its length and positions refer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.evict import check_protected
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.prompt.chunks import chunk_ends
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.planning.protection import ProtectedTokens
from kvsieve.planning.roles import ChunkedEvictor
from kvsieve.types import LayerContext, Selection


@dataclass
class Compressed:
    """A compressed prompt: its context is in the cache, its question not yet prefilled.

    Attributes:
        token_index: int64 [B, K], column of the given prompt of each token of the short one, -1 for filler; of the
            context, those of one head.
        layers: int32 [B, H, K], `token_index` of each layer and head; empty if nothing was dropped and nothing is
            prefilled yet.
        asked: the budget's entries.
        raised_to: the evictor's minimum, if that is more.
    """

    token_index: Tensor
    layers: dict[int, Tensor]
    asked: int
    raised_to: int | None


@dataclass(eq=False)
class _ChunkReduction:
    """One chunk: lets the evictor keep `targets` entries per row, and records their moves.

    Attributes:
        evictor: the plan's.
        targets: entries to keep in each row.
        token_index: int [B, L], the columns of the step's tokens as given, -1 for filler.
        origins: int32 [B, H, K], the same for each layer's entries.
        protected: protected tokens, by column as given.
        moves: per layer, int64 [B, H, K], distance from an entry's old position to its new one.
    """

    evictor: ChunkedEvictor
    targets: tuple[int, ...]
    token_index: Tensor
    origins: dict[int, Tensor]
    protected: ProtectedTokens | None
    moves: dict[int, Tensor] = field(default_factory=dict)

    def reduce(self, ctx: LayerContext) -> Selection | None:
        """Select the entries of a layer to keep, in the pass that ends the chunk; see PassRequest.on_layer."""
        if not ctx.step.is_last_chunk:
            return None
        index = self.token_index[:, None].expand(-1, ctx.keys.shape[1], -1).to(torch.int32)
        known = self.origins.get(ctx.layer_idx)
        index = index if known is None else torch.cat([known, index], 2)
        if self.protected is not None:
            # The question is dropped and prefilled again, so nothing of it has to stay here.
            question = self.evictor.question_tokens
            context = F.pad(index[..., :-question], (0, question), value=-1)
            protected, quotas = self.protected.at(context, ctx.valid)
            ctx = dataclasses.replace(ctx, protected=protected, quotas=quotas)
        selection = self.evictor.select(ctx, self.targets)
        assert isinstance(selection, Selection)
        check_protected(self.evictor, ctx, selection)
        slots = selection.indices
        shape = ctx.keys.shape[:3]
        size = slots.shape[2]
        targets = slots.new_tensor(self.targets)[:, None, None]
        filler = torch.arange(size, device=slots.device) < size - targets
        if ctx.valid is None:
            place = torch.arange(shape[2], device=slots.device)[None, None]
        else:
            place = ctx.valid.long().cumsum(-1) - 1
        before = place.expand(shape).gather(2, slots)
        after = torch.arange(size, device=slots.device) - size + targets
        self.moves[ctx.layer_idx] = (after - before).masked_fill(filler, 0)
        self.origins[ctx.layer_idx] = index.gather(2, slots).masked_fill(filler, -1)
        return selection


def compress(
    model: AttachedModel,
    cache: SieveCache,
    input_ids: Tensor,
    token_index: Tensor,
    real: Tensor,
    options: ReadOptions,
    protected: ProtectedTokens | None = None,
) -> Compressed:
    """Prefill all but the question of a prompt into an empty cache, keeping the choice of the plan's evictor.

    Args:
        model: the attached model.
        cache: empty.
        input_ids: int64 [B, N].
        token_index: int64 [B, N'], the columns of its true tokens, in order.
        real: bool [B, N'], False for filler on their left.
        options: its chunk affects only memory.
        protected: tokens that must stay.
    """
    evictor = model.plan.evict
    assert isinstance(evictor, ChunkedEvictor)
    lengths: list[int] = real.sum(-1).tolist()
    width = token_index.shape[1]
    asked = evictor.question_tokens
    chunk = evictor.chunk_length
    tokens = input_ids.gather(1, token_index)
    token_index = token_index.masked_fill(~real, -1)
    contexts = [max(length - asked, 0) for length in lengths]
    kept = kept_of_context(evictor, lengths)
    entries = max(evictor.requested(length) for length in lengths)
    least = max(evictor.entries(length) for length in lengths)
    done = Compressed(token_index, {}, entries, least if least > entries else None)
    if kept == tuple(contexts):
        return done
    origins: dict[int, Tensor] = {}
    for start in range(0, max(contexts), chunk):
        ends = [min(start + chunk, context) for context in contexts]
        at = _step_columns(lengths, ends, start, width, asked, tokens.device)
        targets = tuple(
            # A share of a short chunk may have no room for what the evictor always keeps.
            max(min(end, max(evictor.minimum - asked, 1)), keep * end // max(context, 1))
            for keep, end, context in zip(kept, ends, contexts, strict=True)
        )
        if protected is not None:
            numbers = torch.arange(width) - width + torch.tensor(lengths)[:, None]
            must = protected.reindexed(token_index).needed((numbers >= 0) & (numbers < torch.tensor(ends)[:, None]))
            targets = tuple(map(max, targets, must))
        columns = token_index.gather(1, at.clamp_min(0)).masked_fill(at < 0, -1)
        step = _ChunkReduction(evictor, targets, columns.to(model.model.device), origins, protected)
        _read(model, cache, step, tokens.gather(1, at.clamp_min(0)), at >= 0, options)
        _move_together(model, cache, step)
        if options.progress is not None:
            options.progress(min(start + chunk, max(contexts)), width)
    question = token_index[:, -asked:]
    for index, part in origins.items():
        own = question.to(part.device, torch.int32)[:, None].expand(-1, part.shape[1], -1)
        done.layers[index] = torch.cat([part, own], 2)
    done.token_index = next(iter(done.layers.values()))[:, 0].long().to(token_index.device)
    return done


def kept_of_context(evictor: ChunkedEvictor, lengths: list[int]) -> tuple[int, ...]:
    """Return the entries that rows of `lengths` tokens keep of the context before the question."""
    question = evictor.question_tokens
    return tuple(min(max(length - question, 0), evictor.entries(length) - question) for length in lengths)


def _step_columns(
    lengths: list[int], ends: list[int], start: int, width: int, asked: int, device: torch.device
) -> Tensor:
    """Return the columns [B, chunk + question] of a step's tokens; -1 for filler, on the chunk's left."""
    sizes = [max(end - start, 0) for end in ends]
    at = torch.full((len(lengths), max(sizes) + asked), -1, device=device)
    for row, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        first = width - length + start
        at[row, max(sizes) - size : max(sizes)] = torch.arange(first, first + size)
        own = min(asked, length)
        at[row, at.shape[1] - own :] = torch.arange(width - own, width)
    return at


def _read(
    model: AttachedModel, cache: SieveCache, step: _ChunkReduction, tokens: Tensor, real: Tensor, options: ReadOptions
) -> None:
    """Feed tokens [B, L] to the cache; the last pass, with the question, reduces it."""
    seen = cache.num_seen
    known = cache.conversation.mask
    size = tokens.shape[1]
    real = real.to(model.model.device)
    known = real.new_ones(len(tokens), seen) if known is None else known
    whole = torch.cat([known, real], 1)
    mask = None if bool(whole.all()) else whole
    ends = chunk_ends(size, options.chunk, step.evictor.window)
    for first, last in zip([0, *ends], ends, strict=False):
        request = PassRequest(Plan(name=model.plan.name), "prefill", last_chunk=last == size, on_layer=step.reduce)
        model.feed(cache, tokens[:, first:last], None if mask is None else mask[:, : seen + last], request)


def _move_together(model: AttachedModel, cache: SieveCache, step: _ChunkReduction) -> None:
    """Re-rotate the kept keys to their new positions, and reset the cache to one that has seen these tokens alone."""
    size = max(step.targets)
    slots = torch.arange(size, device=model.model.device)
    real = slots >= size - torch.tensor(step.targets, device=slots.device)[:, None]
    for index, layer in cache.sieve_layers.items():
        keys = layer.store.keys
        moves = step.moves[index]
        # Heads keep different entries, so each is a row of its own here.
        alone = keys.reshape(-1, 1, *keys.shape[2:])
        keys.copy_(model.facts.rotate(index, alone, moves.to(keys.device).flatten(0, 1)).reshape(keys.shape))
        layer.store.index.copy_(slots.to(keys.device).masked_fill(~real.to(keys.device), -1)[:, None])
        layer.num_seen = size
    cache.conversation.num_seen, cache.conversation.mask = size, None if bool(real.all()) else real
    cache.conversation.ids = None
