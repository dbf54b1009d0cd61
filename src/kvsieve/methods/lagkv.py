"""LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important (arXiv 2504.04704), eqs. 7-13.

After S sinks the entries are cut into partitions of L. Each is scored once, relative to the next one: keys and values
are scaled, channel by channel, to the range they have there (eqs. 7-9); a token's score is the softmax, over its
partition, of the spread over channels (eqs. 10-11), summed for keys and values. The best r L of every KV head stay, and
so do the last partition and the remainder. Eviction runs whenever another partition is full: after the prompt, after
its chunks, and during decode. Needs no queries or attention weights.

r is solved from the budget (eq. 13) for the whole conversation at each eviction: partitions that kept more are cut by
their scores, so that all keep equal numbers, as with a single prompt. ``chunks=True`` is as in the paper: r is the
budget's share itself, and kept entries of a partition stay.

Variants: "local" uses the range of the partition itself (eqs. 14-15); "l2" ranks by the smallest key norm in the same
scheme, with `skip_layers=2`.

The defaults are the paper's of section 3.2 (RULER): lag 128, r by eq. 13, with the 16 sinks of section 3.3, which 3.2
does not state. Section 3.3 has lags of 128, 512 and 1024 and a fixed r: `lag=1024, chunks=True`.

Differences from the reference: scores in float32; channels that are constant in the next partition have a range of 1e-6
instead of dividing by zero; kept entries ascending; rows of a batch have separate partitions. Unless ``chunks``, the
budget is met to the entry, with the remainders of rounding r L down given to the newest partitions, and holds over
turns and, up to a partition in progress, during decode.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvsieve.core.scoring import score_dtype
from kvsieve.core.selection import pack, top_mask
from kvsieve.errors import InputError, PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int, parse_layers, skipped, skips
from kvsieve.planning.budget import Budget
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Evictor
from kvsieve.types import LayerContext, Selection, When

Variant = Literal["lag", "local", "l2"]


@register_method("lagkv", title="LagKV", paper="arXiv 2504.04704", phase="end of prompt, decode", budget="25%")
@dataclass(frozen=True, kw_only=True)
class LagKV(Evictor, heads="own", query_aware=False, fixed_counts=True, remembers=True):
    """Keep the entries that deviate most from the range of the next ones; uses no queries.

    budget: entries left after the prompt, including sinks, last partition and remainder. sinks: S first tokens, always
    kept. lag: L, entries per partition. variant: see the module. chunks: also evict between the chunks of a chunked
    prompt, which then attend to the remaining entries; r is then the budget's share itself, without sinks and last
    entries. decode: also during decode. skip_layers: layers that keep all: how many at the start, or which.

    A partition with more protected entries than its share keeps those; the others then keep less, unless ``chunks``.
    """

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
                f"like '25%', got {self.budget}"
            )

    @property
    def when(self) -> When:
        return When(chunks=self.chunks, steps=1 if self.decode else None)

    @property
    def why_not_edited(self) -> str | None:
        return "it has cut the conversation into partitions as it stood"

    def why_not_joined(self, before: int) -> str | None:
        if before <= self.sinks:
            # Later turns cut what is left of all documents into partitions.
            return None
        return f"its heads keep different ones of the {before} tokens before the documents; give it sinks={before}"

    def rhythm(self, prompt: int) -> tuple[int, int] | None:
        return (self.lag, self.sinks) if self.decode else None

    @property
    def minimum(self) -> int:
        return self.sinks + 2 * self.lag

    def shares(self, sizes: Sequence[int], room: int, protected: Sequence[int]) -> list[int]:
        """Divide `room` entries equally among partitions of these `sizes`, within their sizes.

        protected: how many must stay of each.
        """
        parts = list(zip(sizes, protected, strict=True))

        def kept(share: int) -> list[int]:
            return [min(size, max(share, must)) for size, must in parts]

        share = max(bisect.bisect_right(range(self.lag + 1), room, key=lambda share: sum(kept(share))) - 1, 0)
        shares = kept(share)
        # The remainder is less than one per partition that could keep more; the newest get it.
        rest = room - sum(shares)
        for index in reversed(range(len(parts))):
            if rest > 0 and shares[index] == share < sizes[index]:
                shares[index] += 1
                rest -= 1
        return shares

    @property
    def _fixed(self) -> int:
        return int(self.lag * (self.budget.ratio or 0))

    def _acts(self, stored: int, count: int, done: int, ends_prompt: bool) -> bool:
        """Return True if a row evicts entries; `done` of them are sinks or scored."""
        another = self._new(stored, done) > 0
        if self.chunks:
            return another
        return stored > count and (another or (ends_prompt and done > self.sinks))

    def _new(self, stored: int, done: int) -> int:
        complete = max((stored - done) // self.lag - 1, 0)
        if not self.chunks:
            return complete
        dropped = self.lag - self._fixed
        # With its share alone, a short prompt would be cut below the floor.
        return min(complete, max(stored - self.budget.floor, 0) // dropped) if dropped > 0 else 0

    def is_noop(self, layer_idx: int, num_layers: int, stored: tuple[int, ...], state: dict[str, Any]) -> bool:
        if skipped(self.skip_layers, layer_idx, num_layers):
            return True
        if "counts" not in state:
            return False
        # Called at every token.
        judged = state["judged"].sum(1).tolist() if "judged" in state else [0] * len(stored)
        rows = zip(stored, state["counts"].tolist(), judged, strict=True)
        return not any(self._acts(entries, count, self.sinks + done, False) for entries, count, done in rows)

    @staticmethod
    def _judged(state: dict[str, Any], rows: int) -> Tensor:
        """Return the entries left of each scored partition, int64 [B, P], 0 for none."""
        judged: Tensor = state.get("judged", torch.zeros(rows, 0, dtype=torch.int64))
        return judged

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        judged = [[size for size in row if size] for row in self._judged(ctx.state, len(counts)).tolist()]
        done = [self.sinks + sum(sizes) for sizes in judged]
        ctx.state["counts"] = torch.tensor(counts)
        rows = zip(ctx.stored, counts, done, strict=True)
        acts = [self._acts(*row, ctx.step.ends_prompt) for row in rows]
        if not any(acts):
            return None
        mask = torch.zeros(ctx.keys.shape[:3], dtype=torch.bool, device=ctx.keys.device)
        lengths = []
        scores = []
        for row, sizes in enumerate(judged):
            slots = self._slots(ctx, row, done[row] if sizes else 0)
            stay = torch.ones_like(slots, dtype=torch.bool)
            lengths.append(ctx.stored[row])
            if acts[row]:
                judged[row], own, dropped = self._cut(ctx, row, slots, sizes, counts[row], stay)
                lengths[row] -= dropped
            else:
                own = self._known(ctx, row, sum(sizes))
            scores.append(own)
            mask[row].scatter_(1, slots, stay)
        if tuple(lengths) == ctx.stored:
            return None
        most = max(map(len, judged))
        widest = max(map(sum, judged))
        ctx.state["judged"] = torch.tensor([sizes + [0] * (most - len(sizes)) for sizes in judged], dtype=torch.int64)
        ctx.state["scores"] = torch.stack([torch.nn.functional.pad(own, (0, widest - own.shape[1])) for own in scores])
        return pack(mask, tuple(lengths))

    @staticmethod
    def _known(ctx: LayerContext, row: int, size: int) -> Tensor:
        if not size:
            return torch.zeros(ctx.keys.shape[1], 0, dtype=score_dtype(ctx.keys.dtype), device=ctx.keys.device)
        scores: Tensor = ctx.state["scores"]
        return scores[row, :, :size]

    @staticmethod
    def _slots(ctx: LayerContext, row: int, done: int) -> Tensor:
        """Return the slots of a row's real entries, in order, [H, n]; the first `done` must be complete."""
        heads, size = ctx.keys.shape[1:3]
        stored = ctx.stored[row]
        if ctx.valid is None:
            return torch.arange(size - stored, size, device=ctx.keys.device).expand(heads, -1)
        valid = ctx.valid[row].expand(heads, -1)
        if bool((valid.sum(-1) == stored).all()) and done <= stored:
            slots = valid.nonzero()[:, 1].view(heads, stored)
            if not done or bool((slots[:, done - 1] - slots[:, 0] == done - 1).all()):
                return slots
        raise InputError(
            "LagKV cuts rows into partitions and cannot leave out tokens of those that it has judged, which a later "
            "attention_mask hides; leave them visible, or start with a new cache"
        )

    def _cut(
        self, ctx: LayerContext, row: int, slots: Tensor, sizes: list[int], count: int, stay: Tensor
    ) -> tuple[list[int], Tensor, int]:
        """Choose which of a row's `slots` stay, in bool `stay` [H, n].

        sizes: entries left of the partitions scored before.

        Returns the entries that partitions keep, their scores [H, m], and how many entries are evicted.
        """
        done = self.sinks + sum(sizes)
        stored = slots.shape[1]
        new = self._new(stored, done)
        end = done + new * self.lag
        whole = [*sizes, *[self.lag] * new]
        must = None
        protected = [0] * len(whole)
        if ctx.protected is not None:
            must = ctx.protected[row].gather(1, slots[:, self.sinks : end])
            # The same tokens are protected in all heads, and stay in all of them.
            protected = [int(part.sum()) for part in must[0].cpu().split(whole)]
        if self.chunks:
            kept = [*sizes, *(max(self._fixed, least) for least in protected[len(sizes) :])]
        else:
            kept = self.shares(whole, count - self.sinks - (stored - end), protected)
        scores = self._known(ctx, row, done - self.sinks)
        if new:
            rows = slots[:, done : end + self.lag, None]
            pair = (part[row].gather(1, rows.expand(-1, -1, part.shape[-1])) for part in (ctx.keys, ctx.values))
            scores = torch.cat([scores, self._scores(*pair).flatten(1)], 1)
        ranked = scores if must is None else scores.masked_fill(must, float("inf"))
        best = self._best(ranked, whole, kept)
        stay[:, self.sinks : end] = best
        chosen = pack(best, (sum(kept),) * len(slots)).indices
        return kept, scores.gather(1, chosen), sum(whole) - sum(kept)

    def _best(self, scores: Tensor, sizes: list[int], kept: list[int]) -> Tensor:
        """Return the best ``kept[p]`` of each partition of scores [H, m], bool [H, m]."""
        table = scores
        places = None
        if min(sizes) < self.lag:
            real = torch.arange(self.lag) < torch.tensor(sizes)[:, None]
            places = real.flatten().nonzero()[:, 0].to(scores.device, non_blocking=True)
            table = scores.new_full((len(scores), real.numel()), float("-inf")).index_copy_(1, places, scores)
        best = top_mask(table.unflatten(1, (-1, self.lag)), torch.tensor([kept] * len(scores))).flatten(1)
        return best if places is None else best.index_select(1, places)

    def _scores(self, keys: Tensor, values: Tensor) -> Tensor:
        dtype = score_dtype(keys.dtype)
        parts = [part.to(dtype).unflatten(1, (-1, self.lag)) for part in (keys, values)]
        if self.variant == "l2":
            return -parts[0][:, :-1].norm(dim=-1)
        return sum(self._spread(part) for part in parts)  # type: ignore[return-value]

    def _spread(self, part: Tensor) -> Tensor:
        own = part[:, :-1]
        reference = own if self.variant == "local" else part[:, 1:]
        low = reference.amin(2, keepdim=True)
        high = reference.amax(2, keepdim=True)
        scaled = (own - low) / (high - low).clamp_min(1e-6)
        return scaled.std(-1).softmax(-1)
