"""Prompts that are reduced while they are read, chunk by chunk, in the light of the question (roles.ChunkedEvictor).

Nothing that is kept stays where it stood: after each chunk the question's entries go, and the keys that stay turn to
the positions 0, 1, ... The cache then holds a prompt of its own, which is all that its length and positions speak of;
what its caller knows is remembered in a `Restart`, as for prompts that are read twice.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsieve.errors import UnsupportedModelError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.evict import check_held
from kvsieve.hf.prompt.chunks import chunk_ends
from kvsieve.plans import Plan
from kvsieve.protection import ProtectedTokens
from kvsieve.roles import ChunkedEvictor, Evictor
from kvsieve.types import LayerContext, Selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvsieve.budget import Budget
    from kvsieve.hf.attach import Sieve


@dataclass
class Condensed:
    """What a prompt became: its context in the cache, and its question, which is yet to be read.

    columns: int64 [B, K], where each token that the cache is to hold stood in the prompt as given, -1 for filler; of
    the context, those of one head. layers: the same for each layer and head, int32 [B, H, K]; none where nothing was
    dropped and all is yet to be read. asked: the budget's entries; raised_to: the evictor's minimum where that is more.
    """

    columns: Tensor
    layers: dict[int, Tensor]
    asked: int
    raised_to: int | None


@dataclass(eq=False)
class _Step(Evictor):
    """The evictor of one chunk's pass: lets `inner` keep `targets` entries per row and notes where these must move.

    columns: int [B, L], the columns of this pass's tokens as given, -1 for filler. moves: per layer, int64
    [B, H, K], from the position an entry was read at to its new one. held: what must stay, by column as given.
    """

    inner: ChunkedEvictor
    targets: tuple[int, ...]
    columns: Tensor
    origins: dict[int, Tensor]
    held: ProtectedTokens | None
    moves: dict[int, Tensor] = field(default_factory=dict)

    @property
    def budget(self) -> Budget:
        return self.inner.budget

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection:
        columns = self.columns[:, None].expand(-1, ctx.keys.shape[1], -1).to(torch.int32)
        known = self.origins.get(ctx.layer_idx)
        columns = columns if known is None else torch.cat([known, columns], 2)
        if self.held is not None:
            # The question is forgotten and read again, so nothing of it has to stay here.
            context = torch.nn.functional.pad(
                columns[..., : -self.inner.question_tokens], (0, self.inner.question_tokens), value=-1
            )
            protected, quotas = self.held.at(context, ctx.valid)
            ctx = dataclasses.replace(ctx, protected=protected, quotas=quotas)
        selection = self.inner.select(ctx, self.targets)
        assert isinstance(selection, Selection)
        check_held(self.inner, ctx, selection)
        slots, shape = selection.indices, ctx.keys.shape[:3]
        size = slots.shape[2]
        filler = torch.arange(size, device=slots.device) < size - slots.new_tensor(self.targets)[:, None, None]
        if ctx.valid is None:
            place = torch.arange(shape[2], device=slots.device)[None, None]
        else:
            place = ctx.valid.long().cumsum(-1) - 1
        before = place.expand(shape).gather(2, slots)
        after = torch.arange(size, device=slots.device) - size + slots.new_tensor(self.targets)[:, None, None]
        self.moves[ctx.layer_idx] = (after - before).masked_fill(filler, 0)
        self.origins[ctx.layer_idx] = columns.gather(2, slots).masked_fill(filler, -1)
        return selection


def condense(
    sieve: Sieve,
    cache: SieveCache,
    input_ids: Tensor,
    columns: Tensor,
    real: Tensor,
    *,
    chunk: int | None,
    progress: Callable[[int, int], None] | None,
    held: ProtectedTokens | None = None,
) -> Condensed:
    """Read all but the question of a prompt into an empty cache, keeping what the plan's evictor chooses.

    input_ids: int64 [B, N]; columns: int64 [B, N'], those of its true tokens, in order; real: bool, False for filler on
    their left. chunk: tokens per forward pass, which changes nothing but memory. held: what must stay of the prompt.

    Raises UnsupportedModelError for a model with sliding-window layers.
    """
    evictor = sieve.plan.evict
    assert isinstance(evictor, ChunkedEvictor)
    if len(cache.sieve_layers) != len(cache.layers):
        raise UnsupportedModelError(
            f"{type(sieve.model).__name__} cannot run {sieve.plan.name!r}: its sliding-window layers cannot move what "
            "they hold"
        )
    lengths: list[int] = real.sum(-1).tolist()
    tokens, width, asked = input_ids.gather(1, columns), columns.shape[1], evictor.question_tokens
    columns = columns.masked_fill(~real, -1)
    contexts = [max(length - asked, 0) for length in lengths]
    kept = kept_of_context(evictor, lengths)
    entries = max(evictor.requested(length) for length in lengths)
    least = max(evictor.entries(length) for length in lengths)
    done = Condensed(columns, {}, entries, least if least > entries else None)
    if kept == tuple(contexts):
        return done
    origins: dict[int, Tensor] = {}
    for start in range(0, max(contexts), evictor.chunk_length):
        sizes = [min(evictor.chunk_length, max(context - start, 0)) for context in contexts]
        # Columns of this pass: the chunk, aligned right, and the question.
        at = torch.full((len(lengths), max(sizes) + asked), -1, device=tokens.device)
        for row, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
            first = width - length + start
            at[row, max(sizes) - size : max(sizes)] = torch.arange(first, first + size)
            own = min(asked, length)
            at[row, at.shape[1] - own :] = torch.arange(width - own, width)
        targets = tuple(
            max(min(context, 1), keep * min(start + evictor.chunk_length, context) // max(context, 1))
            for keep, context in zip(kept, contexts, strict=True)
        )
        if held is not None:
            numbers = torch.arange(width) - width + torch.tensor(lengths)[:, None]
            ends = torch.tensor([min(start + evictor.chunk_length, context) for context in contexts])
            must = held.reindexed(columns).needed((numbers >= 0) & (numbers < ends[:, None]))
            targets = tuple(map(max, targets, must))
        given = columns.gather(1, at.clamp_min(0)).masked_fill(at < 0, -1)
        step = _Step(evictor, targets, given.to(sieve.model.device), origins, held)
        _read(sieve, cache, step, tokens.gather(1, at.clamp_min(0)), at >= 0, chunk_ends(at.shape[1], chunk, asked))
        _move_together(sieve, cache, step)
        if progress is not None:
            progress(min(start + evictor.chunk_length, max(contexts)), width)
    question = columns[:, -asked:]
    for index, part in origins.items():
        own = question.to(part.device, torch.int32)[:, None].expand(-1, part.shape[1], -1)
        done.layers[index] = torch.cat([part, own], 2)
    done.columns = next(iter(done.layers.values()))[:, 0].long().to(columns.device)
    return done


def kept_of_context(evictor: ChunkedEvictor, lengths: list[int]) -> tuple[int, ...]:
    """Entries that rows of `lengths` tokens keep of what stands before the question."""
    return tuple(
        min(max(length - evictor.question_tokens, 0), evictor.entries(length) - evictor.question_tokens)
        for length in lengths
    )


def _read(sieve: Sieve, cache: SieveCache, step: _Step, tokens: Tensor, real: Tensor, ends: list[int]) -> None:
    """Feed tokens [B, L] after what the cache holds; the last pass, which holds the question, evicts."""
    seen = cache.num_seen
    tokens, real = tokens.to(sieve.model.device), real.to(sieve.model.device)
    known = real.new_ones(len(tokens), seen) if cache.mask is None else cache.mask
    whole = torch.cat([known, real], 1)
    mask = None if bool(whole.all()) else whole.long()
    positions = (whole.long().cumsum(-1) - 1).clamp_min(0)
    cache.own_plan = Plan(evict=step, name=sieve.plan.name)
    try:
        for first, last in zip([0, *ends], ends, strict=False):
            cache.awaits_prompt, cache.more_chunks = True, last < tokens.shape[1]
            with torch.no_grad():
                sieve.decoder(
                    input_ids=tokens[:, first:last],
                    attention_mask=None if mask is None else mask[:, : seen + last],
                    position_ids=positions[:, seen + first : seen + last],
                    past_key_values=cache,
                    use_cache=True,
                )
    finally:
        cache.own_plan, cache.more_chunks = None, False


def _move_together(sieve: Sieve, cache: SieveCache, step: _Step) -> None:
    """Turn the keys that were kept to their new positions, and make the cache one that has seen these tokens alone."""
    size = max(step.targets)
    slots = torch.arange(size, device=sieve.model.device)
    real = slots >= size - torch.tensor(step.targets, device=slots.device)[:, None]
    for index, layer in cache.sieve_layers.items():
        keys, moves = layer.store.keys, step.moves[index]
        # Heads keep different entries, so each is a row of its own here.
        alone = keys.reshape(-1, 1, *keys.shape[2:])
        turned = sieve.facts.rotate(index, alone, moves.to(keys.device).flatten(0, 1))
        keys.copy_(turned.reshape(keys.shape))
        layer.store.index.copy_(slots.to(keys.device).masked_fill(~real.to(keys.device), -1)[:, None])
        layer.num_seen = size
    cache.num_seen, cache.mask = size, None if bool(real.all()) else real
