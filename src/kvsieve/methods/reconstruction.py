"""Evictors that score entries by the attention of tokens fed again after prefill, as in KVzip (arXiv 2505.23416).

An entry's score is the largest attention it gets from any of the tokens fed for its chunk and any query head of its
group, in a softmax over the prefix, the chunk and the tokens fed. Fed tokens are not stored. The best entries of all
layers and heads together stay, so that heads keep different numbers, or the best of each head (`uniform=True`).
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvsieve.core.queries import query_mass
from kvsieve.core.selection import best_of_layers, entries_at, pack_ragged, select_top
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import apply_protection, check_int, first_real, hide_padding, parse_layers, skips
from kvsieve.methods.repeating import side_by_side
from kvsieve.methods.stays import Stays
from kvsieve.planning.budget import Budget
from kvsieve.planning.roles import Branch, ProbePasses, ProbingEvictor, Traits
from kvsieve.types import LayerContext, Selection

_STATE = "kvzip"

Fed = Callable[[int, Tensor, int], Tensor]
"""Returns a chunk's tokens to feed; takes the row's number, its tokens [n] without padding, and the chunk's start."""


@dataclass(frozen=True, kw_only=True)
class ReconstructionEvictor(Stays, ProbingEvictor, ragged=True, takes_quotas=True):
    """An evictor that feeds tokens for every chunk of a conversation, and ranks the chunk's entries by their attention.

    budget: entries per layer and KV head, including the prefix, on average over layers and heads unless ``uniform``.
    prefix: first tokens that always stay, at least 1. chunk_length: tokens of a chunk. uniform: the same number in
    every head. skip_layers: layers that keep all, not counted.
    """

    stays = ("prefix",)

    budget: Budget
    prefix: int = 4
    chunk_length: int = 2048
    uniform: bool = False
    skip_layers: int | tuple[int, ...] = 0

    @property
    def traits(self) -> Traits:
        own = self.TRAITS
        return replace(own, ragged=False, heads=own.heads and "own") if self.uniform else own

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        check_int(self, "prefix", self.prefix, 1)
        check_int(self, "chunk_length", self.chunk_length, 1)
        object.__setattr__(self, "skip_layers", parse_layers(self, self.skip_layers))
        self.budget.refuse_fewer(self.minimum, type(self).__name__, self.why_minimum)

    @abstractmethod
    def prepare(self, passes: ProbePasses, numbers: Tensor) -> tuple[Branch, Fed]:
        """Prefill the rest of the prompt in a branch; return the branch, and what to feed to branches of it.

        numbers: int64 [B, N], the number of each token in its row, -1 for padding.
        """

    def probe(self, passes: ProbePasses) -> None:
        numbers = (passes.real.long().cumsum(-1) - 1).masked_fill(~passes.real, -1)
        whole, fed = self.prepare(passes, numbers)
        scores: dict[int, Tensor] = {}
        for start in range(0, int(numbers.max()) + 1, self.chunk_length):
            tokens = (ids[real] for ids, real in zip(passes.ids, passes.real, strict=True))
            ids, real = side_by_side([fed(row, own, start) for row, own in enumerate(tokens)], passes)
            observe = functools.partial(self._score, scores, numbers, start)
            whole.branch().feed(ids, real, observe=observe)
        for index, layer in scores.items():
            passes.state(index)[_STATE] = layer
            passes.state(index)["kvzip_closes"] = index == max(scores)

    def _score(self, scores: dict[int, Tensor], numbers: Tensor, start: int, ctx: LayerContext) -> None:
        """Raise the scores [B, H, N] of a layer's entries in the chunk from token `start` to their attention here."""
        if skips(self.skip_layers, ctx):
            return
        fed = ctx.query.shape[2]
        stored = ctx.keys.shape[2] - fed
        index = ctx.index[:, :, :stored].long()
        # The number of each entry's token in its row, -1 for padding and filler.
        token = numbers.to(index.device)[:, None].expand(-1, index.shape[1], -1).gather(2, index.clamp_min(0))
        real = torch.ones_like(ctx.index, dtype=torch.bool) if ctx.valid is None else ctx.valid.expand_as(ctx.index)
        token = token.masked_fill((index < 0) | ~real[:, :, :stored], -1)
        inside = (token >= start) & (token < start + self.chunk_length)
        shown = inside | ((token >= 0) & (token < self.prefix))
        # Only these are attended to: their slots, in order, at the right end.
        slots = shown.to(torch.uint8).argsort(dim=-1, stable=True)[..., stored - int(shown.sum(-1).max()) :]
        keys = entries_at(ctx.keys[:, :, :stored], slots)
        causal = torch.ones(1, 1, fed, fed, dtype=torch.bool, device=keys.device).tril()
        before = shown.gather(2, slots)[:, :, None].expand(-1, -1, fed, -1)
        if ctx.valid is not None:
            own = real[:, :, None, stored:]
            causal = causal & own & own.transpose(2, 3)
            before = before & own.transpose(2, 3)
        visible = torch.cat([before, causal.expand(*before.shape[:2], -1, -1)], -1)
        among = torch.cat([keys, ctx.keys[:, :, stored:]], 2)
        size = slots.shape[-1]
        weights = ctx.log_weight
        if weights is not None:
            weights = torch.cat([weights[:, :, :stored].gather(2, slots), weights[:, :, stored:]], 2)
        mass = query_mass(ctx.asks(ctx.query), among, visible, reduce="max", entries=size, log_weight=weights)
        best = mass.unflatten(1, (keys.shape[1], -1)).amax(2)
        best = best.masked_fill(~inside.gather(2, slots), 0)
        known = scores.setdefault(ctx.layer_idx, best.new_zeros(index.shape))
        known.scatter_reduce_(2, slots, best, "amax")

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:
        scores = ctx.state.pop(_STATE, None)
        closes = ctx.state.pop("kvzip_closes", False)
        if scores is None:
            return None
        scores = scores.masked_fill(first_real(ctx, self.prefix), float("inf"))
        kept = tuple(min(count, stored) for count, stored in zip(counts, ctx.stored, strict=True))
        if self.uniform:
            return None if kept == ctx.stored else select_top(*apply_protection(ctx, hide_padding(ctx, scores), kept))
        layers: dict[int, tuple[Tensor, int]] = ctx.shared.setdefault(_STATE, {})
        ranking = apply_protection(ctx, hide_padding(ctx, scores), kept)[0]
        layers[ctx.layer_idx] = ctx.ranks.gather(ranking), ranking.shape[2]
        if not closes:
            return None
        masks = best_of_layers(layers, counts, ctx.ranks)
        return {index: pack_ragged(mask) for index, mask in masks.items() if not bool(mask.all())}
