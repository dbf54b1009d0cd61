"""An evictor that writes: entries stand for two tokens, or the same as two copies, which is the same attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvsieve.core.selection import entries_at, pack_ragged
from kvsieve.planning.budget import Budget
from kvsieve.planning.roles import Evictor
from kvsieve.types import When


@dataclass(frozen=True, kw_only=True)
class Pairs(Evictor, heads="own", query_aware=False, writes=True):
    """In the first turn, the first of two neighbours takes the place of both.

    copies: it is written to both places, instead of one with a weight of 2. late: tokens of the answer after which it
    acts, instead of at the end of the prompt.
    """

    budget: Budget = Budget(ratio=0.5)
    copies: bool = False
    late: int | None = None

    @property
    def when(self):
        return When(steps=self.late)

    def halved(self, real):
        """Return where neighbours become one, bool [B, H, N]."""
        return real

    def select(self, ctx, counts):
        heads = ctx.keys.shape[1]
        done = ctx.state.get("done")
        if ctx.step.turn or done is not None or (self.late is not None) != (ctx.step.phase == "decode"):
            return None
        ctx.state["done"] = torch.ones(len(ctx.keys))
        real = torch.ones_like(ctx.index, dtype=torch.bool) if ctx.valid is None else ctx.valid.expand(-1, heads, -1)
        number = real.cumsum(-1) - 1
        follows = real & (number % 2 == 1) & self.halved(real)
        slots = torch.arange(real.shape[-1]).expand_as(number)
        first = slots.masked_fill(~real | follows, 0).cummax(-1).values
        if self.copies:
            chosen = pack_ragged(real)
            source = first.gather(2, chosen.indices)
            return replace(chosen, keys=entries_at(ctx.keys, source), values=entries_at(ctx.values, source))
        chosen = pack_ragged(real & ~follows)
        weights = torch.zeros(real.shape).scatter_add(2, first, real.float()).gather(2, chosen.indices)
        return replace(chosen, log_weight=weights.clamp_min(1).log())


@dataclass(frozen=True, kw_only=True)
class SomePairs(Pairs, heads="own", query_aware=False, ragged=True):
    """The same for every second head alone: heads keep different numbers of entries."""

    def halved(self, real):
        return (torch.arange(real.shape[1]) % 2 == 0)[None, :, None]
