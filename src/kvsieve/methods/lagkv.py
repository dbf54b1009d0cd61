"""LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important (arXiv 2504.04704), eqs. 7-13.

After S sinks the entries are cut into partitions of L. Each is judged once, against the next one: keys and values are
scaled, channel by channel, to the range they have there (eqs. 7-9), a token's score is the softmax, over its
partition, of the spread over channels (eqs. 10-11), keys and values added. The best floor(r L) of every KV head stay.
The last partition and the remainder always stay, so it runs again whenever another partition has filled: after the
prompt, after its chunks, and while decoding. No queries and no attention weights are needed.

Variants: "local" takes the range from the partition itself (eqs. 14-15); "l2" ranks by the smallest key norm, on the
same frame, all of `skip_layers=2` first layers kept.

Differences from the reference: scores in float32; channels that are constant in the next partition have a range of
1e-6 instead of dividing by zero; kept entries ascending; rows of a batch have partitions of their own. The budget is
what is stored right after the prompt, r solved from it (eq. 13), rounded down to whole tokens per partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvsieve.budget import Budget
from kvsieve.core.scoring import score_dtype
from kvsieve.core.selection import pack, top_mask
from kvsieve.errors import InputError, PlanError
from kvsieve.methods.base import check_int, parse_layers, skipped, skips
from kvsieve.parameters import Checked
from kvsieve.plans import Plan
from kvsieve.registry import register_method
from kvsieve.types import LayerContext, Selection, When

Variant = Literal["lag", "local", "l2"]


@dataclass(frozen=True, kw_only=True)
class LagKV(Checked):
    """Judge each partition of `lag` entries against the next, and keep its best per KV head.

    budget: entries left after the prompt, sinks, last partition and remainder included. sinks: S first tokens, never
    judged. lag: L, entries per partition. variant: see the module. chunks: also between the chunks of a chunked
    prompt, which then attend to what is left; r is then the budget's share itself. decode: also while decoding.
    skip_layers: layers that keep all: how many at the start, or which.

    A partition with more protected entries than its share keeps those; the others then keep less, unless ``chunks``.
    """

    needs_heads = "own"

    budget: Budget
    sinks: int = 16
    lag: int = 128
    variant: Variant = "lag"
    chunks: bool = False
    decode: bool = True
    skip_layers: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        check_int(self, "sinks", self.sinks, 0)
        check_int(self, "lag", self.lag, 2)
        object.__setattr__(self, "skip_layers", parse_layers(self, self.skip_layers))
        if self.chunks and self.budget.ratio is None:
            raise PlanError(
                f"LagKV(chunks=True) judges chunks before the prompt's length is known, so its budget must be a share "
                f"like '25%', got {self.budget} entries"
            )

    @property
    def when(self) -> When:
        return When(chunks=self.chunks, steps=1 if self.decode else None)

    @property
    def window(self) -> int:
        return 0

    @property
    def minimum(self) -> int:
        return self.sinks + 2 * self.lag

    def kept_per_partition(self, length: int, budget: int, protected: Sequence[int] = ()) -> int:
        """floor(r L), from eq. 13: most entries a partition may keep so that a row of `length` has `budget` left.

        protected: how many must stay of the first partitions.
        """
        judged = (length - self.sinks) // self.lag - 1
        if judged <= 0:
            return self.lag
        room = budget - self.sinks - self.lag - (length - self.sinks) % self.lag
        keep = max(0, min(self.lag, room // judged))
        while keep and sum(max(keep, held) for held in protected) + (judged - len(protected)) * keep > room:
            keep -= 1
        return keep

    def waits(self, layer_idx: int, num_layers: int, stored: tuple[int, ...], state: dict[str, Any]) -> bool:
        """Whether `select` would drop nothing of a layer that stores so many entries of each row."""
        if skipped(self.skip_layers, layer_idx, num_layers):
            return True
        rows = zip(stored, state["done"].tolist(), state["keep"].tolist(), strict=True) if "keep" in state else ()
        full = [(entries - done) // self.lag > 1 and keep < self.lag for entries, done, keep in rows]
        return bool(full) and not any(full)

    def _protected(self, ctx: LayerContext, row: int, first: int, judged: int) -> list[int]:
        """How many entries are protected in each of the partitions from slot `first` on."""
        if ctx.protected is None or judged < 1:
            return [0] * max(judged, 0)
        # What was not judged yet is the same in all heads.
        part: Tensor = ctx.protected[row, 0, first : first + judged * self.lag]
        return part.unflatten(0, (judged, self.lag)).sum(-1).tolist()

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        # Per row: entries that are done with, sinks first, and how many of each partition stay.
        done = ctx.state.setdefault("done", torch.full((len(counts),), self.sinks))
        size = ctx.keys.shape[2]
        starts = [size - stored + int(skip) for stored, skip in zip(ctx.stored, done, strict=True)]
        parts = [(size - start) // self.lag - 1 for start in starts]
        held = [self._protected(ctx, row, *where) for row, where in enumerate(zip(starts, parts, strict=True))]
        if "keep" not in ctx.state:
            if self.chunks:
                # The prompt's length is not known yet: r is the budget's share itself.
                kept = [int(self.lag * (self.budget.ratio or 0))] * len(counts)
            else:
                rows = zip(ctx.step.lengths, counts, held, strict=True)
                kept = [self.kept_per_partition(*row) for row in rows]
            ctx.state["keep"] = torch.tensor(kept)
        mask = torch.ones(*ctx.keys.shape[:2], size, dtype=torch.bool, device=ctx.keys.device)
        lengths = list(ctx.stored)
        for row, stored in enumerate(ctx.stored):
            first, judged = starts[row], parts[row]
            keep = int(ctx.state["keep"][row])
            mask[row, :, : size - stored] = False
            if judged < 1 or keep >= self.lag:
                continue
            end = first + judged * self.lag
            scores = self._scores(ctx.keys[row, :, first : end + self.lag], ctx.values[row, :, first : end + self.lag])
            if ctx.protected is not None:
                must = ctx.protected[row, :, first:end].unflatten(1, (judged, self.lag))
                scores = scores.masked_fill(must, float("inf"))
            stay = [max(keep, protected) for protected in held[row]]
            best = top_mask(scores, torch.tensor([stay] * len(scores)))
            mask[row, :, first:end] = best.flatten(1)
            done[row] += sum(stay)
            lengths[row] -= judged * self.lag - sum(stay)
        if lengths == list(ctx.stored):
            return None
        if ctx.valid is not None and any(
            not bool(row[:, size - n :].all()) for row, n in zip(ctx.valid, ctx.stored, strict=True)
        ):
            raise InputError(
                "LagKV cuts rows into partitions and cannot leave out tokens in their middle, which a later "
                "attention_mask hides; leave them visible, or start with a new cache"
            )
        return pack(mask, tuple(lengths))

    def _scores(self, keys: Tensor, values: Tensor) -> Tensor:
        """[H, (P + 1) L, D] each -> [H, P, L] scores of the first P partitions."""
        dtype = score_dtype(keys.dtype)
        parts = [each.to(dtype).unflatten(1, (-1, self.lag)) for each in (keys, values)]
        if self.variant == "l2":
            return -parts[0][:, :-1].norm(dim=-1)
        return sum(self._spread(part) for part in parts)  # type: ignore[return-value]

    def _spread(self, part: Tensor) -> Tensor:
        own = part[:, :-1]
        reference = own if self.variant == "local" else part[:, 1:]
        low, high = reference.amin(2, keepdim=True), reference.amax(2, keepdim=True)
        scaled = (own - low) / (high - low).clamp_min(1e-6)
        return scaled.std(-1).softmax(-1)


@register_method("lagkv", title="LagKV", paper="arXiv 2504.04704", phase="end of prompt, decode", query_aware=False)
def lagkv(
    budget: Budget | str | int | float = "25%",
    sinks: int = 16,
    lag: int = 128,
    variant: Variant = "lag",
    chunks: bool = False,
    decode: bool = True,
    skip_layers: int | tuple[int, ...] = 0,
) -> Plan:
    """Entries that stand out from the range of those that follow, no queries needed."""
    return Plan(
        evict=LagKV(
            budget=Budget.parse(budget),
            sinks=sinks,
            lag=lag,
            variant=variant,
            chunks=chunks,
            decode=decode,
            skip_layers=skip_layers,
        )
    )
