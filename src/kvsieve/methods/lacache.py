"""LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of Large Language Models (arXiv 2507.14204).

Chooses by position alone. After the sinks, entries are cut into ladders of W in a row, and each layer keeps E adjacent
entries of a ladder. They begin one entry later in each layer, and at the ladder's first entry again after W - E layers.
With L layers, span S and overlap O, W = 1 + ceil((L - S) / (S - O)) and E = ceil(S / (S - O)), at most W.

An eviction cuts as many ladders as it has entries to drop, from a cursor on. The cursor then moves to their end, so the
next eviction continues with newer text. The newest L entries are in no ladder. If the ladders before these are used up,
the rest is dropped from the sinks on, among entries that are sparse already: the older the text, the fewer entries. If
that takes t passes, they become one with ladders of t (W - 1) + 1 entries that keep E, t apart.

Differences from the reference (its public code): keys keep their tokens' positions, where the code moves them to their
places in the cache (`rerotation` with this base does so after prompts); the budget is met to the entry, by a shorter
last ladder, where the code drops a whole one and adds half of its drops to the budget; with E > 1 and t > 1 the begin
shifts over t (W - E) entries, where the code's entries run into the next ladder; ladders that would drop nothing have
W = E + 1; budgets below the sinks, L and E together keep sinks and recent entries; it acts after `every` tokens, where
the code acts after each one (1 to 128 sinks in its scripts).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, check_int, first_real, skipped
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@register_method("lacache", title="LaCache", paper="arXiv 2507.14204", phase="end of prompt, decode", budget="50%")
@dataclass(frozen=True, kw_only=True)
class LaCache(ScoredEvictor, heads="own", query_aware=False):
    """Keep sinks, recent entries and a ladder: positions that shift from layer to layer, older text sparser.

    sinks: first tokens, always kept. span: S, layers that keep a token, from 1 to one below the model's; None for half
    of the layers. overlap: O, layers that two adjacent tokens share, below the span. Layers of `skip_layers` do not
    count.
    """

    stays = ("sinks",)

    every: int | None = 64
    sinks: int = 4
    span: int | None = None
    overlap: int = 0

    def __post_init__(self) -> None:
        check_int(self, "sinks", self.sinks, 0)
        check_int(self, "overlap", self.overlap, 0)
        if self.span is not None:
            check_int(self, "span", self.span, 1)
            if self.overlap >= self.span:
                raise PlanError(
                    f"LaCache: overlap must be below span={self.span}, got {self.overlap}; lower it, or raise span="
                )
        super().__post_init__()

    def check(self, num_layers: int) -> None:
        super().check(num_layers)
        span = self._span(num_layers)
        if self.span is not None and span >= num_layers:
            raise PlanError(
                f"LaCache: with span={span} all {num_layers} layers of this model keep every token; give a span below "
                f"{num_layers}, or leave it out for half of the layers"
            )
        if self.overlap >= span:
            raise PlanError(
                f"LaCache: overlap={self.overlap} must be below the span, {span} of this model's {num_layers} layers; "
                "lower it"
            )

    def _span(self, layers: int) -> int:
        return -(-layers // 2) if self.span is None else self.span

    def ladder(self, layers: int) -> tuple[int, int]:
        """Return W and E, the entries of a ladder and those that a layer keeps, for this number of layers."""
        span = self._span(layers)
        step = max(span - self.overlap, 1)
        width = 1 + max(-(-(layers - span) // step), 0)
        kept = min(-(-span // step), width)
        return max(width, kept + 1), kept

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        layers = [
            layer
            for layer in ctx.layers or range(ctx.num_layers)
            if not skipped(self.skip_layers, layer, ctx.num_layers)
        ]
        facts = (len(layers), self.ladder(len(layers)), layers.index(ctx.layer_idx))
        sinks = first_real(ctx, self.sinks)
        free = ~sinks if ctx.valid is None else ctx.valid & ~sinks
        sizes = [max(stored - self.sinks, 0) for stored in ctx.stored]
        if ctx.protected is not None:
            free = free & ~ctx.protected
            sizes = free.sum(-1).amax(-1).tolist()
        cursors = self._cursors(ctx)
        chosen = torch.zeros(len(kept), max(*sizes, 1), dtype=torch.bool)
        for row, (count, stored, size) in enumerate(zip(kept, ctx.stored, sizes, strict=True)):
            entries = torch.arange(size)
            room = max(count - (stored - size), 0)
            if room < size:
                entries, cursors[row] = compact(entries, room, cursors[row], *facts)
            chosen[row, entries] = True
        dropped = [length - count for length, count in zip(ctx.step.lengths, kept, strict=True)]
        ctx.state["ladders"] = torch.tensor([cursors, dropped]).T.contiguous()
        batch, heads, length = ctx.keys.shape[:3]
        order = (free.cumsum(-1) - 1).clamp_min(0).expand(batch, heads, length)
        table = chosen.to(ctx.keys.device, non_blocking=True)[:, None].expand(batch, heads, -1)
        recency = torch.arange(length, dtype=torch.float32, device=ctx.keys.device)
        return (recency + length * (table.gather(2, order) & free)).masked_fill(sinks, float("inf"))

    @staticmethod
    def _cursors(ctx: LayerContext) -> list[int]:
        """Return the cursor of each row, counted after the sinks: 0 after an edit, or if other entries are stored."""
        if "ladders" not in ctx.state:
            return [0] * len(ctx.stored)
        rows = zip(ctx.state["ladders"].tolist(), ctx.step.lengths, ctx.stored, strict=True)
        return [cursor if length - stored == dropped else 0 for (cursor, dropped), length, stored in rows]


def compact(
    part: Tensor, room: int, cursor: int, layers: int, ladder: tuple[int, int], place: int
) -> tuple[Tensor, int]:
    """Return the `room` entries that a layer keeps of a sequence after the sinks, and the new cursor.

    Args:
        part: int64 [N], the entries, oldest first, more than `room`.
        room: entries that stay.
        cursor: entry to begin at.
        layers: L.
        ladder: W and E.
        place: number of the layer among the `layers`.
    """
    width, kept = ladder
    most = (room - layers) // kept
    if most < 1:
        return part[len(part) - room :], 0
    drop = len(part) - room
    now = min(drop, max((room - layers - cursor) // kept, 0) * (width - kept))
    part, end = _cut(part, cursor, now, width, kept, 1, place)
    rest = drop - now
    if not rest:
        return part, end
    passes = -(-rest // (most * (width - kept)))
    return _cut(part, 0, rest, passes * (width - 1) + 1, kept, passes, place)


def _cut(part: Tensor, start: int, drop: int, width: int, kept: int, stride: int, place: int) -> tuple[Tensor, int]:
    """Drop entries from `start` on, ladder by ladder, and return the others and the end of the ladders among them."""
    pieces = [part[:start]]
    ladders, rest = divmod(drop, width - kept)
    for count, size in ((ladders, width), (int(rest > 0), kept + rest)):
        apart = min(stride, (size - 1) // max(kept - 1, 1))
        first = place % (size - apart * (kept - 1))
        rungs = part[start : start + count * size].view(count, size)
        pieces.append(rungs[:, first + apart * torch.arange(kept)].flatten())
        start += count * size
    return torch.cat([*pieces, part[start:]]), sum(map(len, pieces))
