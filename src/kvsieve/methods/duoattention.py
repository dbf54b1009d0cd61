"""DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads (arXiv 2410.10819).

Retrieval heads keep every entry; streaming heads keep the first `sinks` and the most recent ones. Scores per head,
measured once per model (`kvsieve calibrate` writes them into a profile), distinguish them. All heads attend to the full
prompt. The budget sets the number of retrieval heads: the most that can keep everything while the others keep at least
sinks + recent; the rest of the total goes to the streaming heads' recent entries. With a budget below sinks + recent
all heads stream, with at most a fifth of it as sinks (as in RocketKV's comparison).

`compensate` is RazorAttention's compensation token (arXiv 2407.15891, equations 4 and 5): one entry of a streaming head
has the mean key and the mean value of those that the head has dropped, and their number as its weight. It counts as an
entry, and takes the place of the oldest recent one, which it includes.

Differences from the reference: scores are measured, not trained with gates; the budget is met exactly instead of a
share of heads; heads are not reordered, since storage is ragged; `every=n` rolls the streaming heads during decode; in
later turns more heads may stream, but a streaming head never retrieves again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from kvsieve.core.scoring import score_dtype
from kvsieve.core.selection import entries_at, pack_ragged, top_mask
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.arrays import check_heads, set_numbers
from kvsieve.methods.base import ScoredEvictor, apply_protection, check_int, first_real, skipped, skips
from kvsieve.planning.answers import refuse_answer
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Heads, Profile, array_of
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Traits
from kvsieve.types import LayerContext, Selection


@dataclass(frozen=True, kw_only=True)
class DuoAttention(ScoredEvictor, heads="all", ragged=True, query_aware=False):
    """Keep everything in retrieval heads, sinks and recent entries in the others.

    heads: a score per layer and KV head, higher for retrieval heads. sinks, recent: least entries of streaming heads,
    if the budget allows. compensate: streaming heads have an entry for those they dropped.
    """

    heads: Heads = field(repr=False)
    sinks: int = 128
    recent: int = 256
    compensate: bool = False

    @property
    def traits(self) -> Traits:
        return replace(self.TRAITS, writes=self.compensate)

    @property
    def why_not_edited(self) -> str | None:
        return super().why_not_edited or "its heads were divided for the conversation as it stood"

    def __post_init__(self) -> None:
        check_int(self, "sinks", self.sinks, 0)
        check_int(self, "recent", self.recent, 1)
        set_numbers(self, "heads", "[layers][KV heads]")
        super().__post_init__()
        refuse_answer(self, self)

    def check_layer(self, index: int, num_layers: int, heads: int, query_heads: int, dim: int) -> None:
        check_heads(self, "scores", self.heads, num_layers, heads)

    def retrieving(self, heads: int, length: int, budget: int) -> int:
        """Return the number of heads, of `heads`, that keep all `length` entries if `budget` is their average."""
        if budget >= length:
            return heads
        least = self.sinks + self.recent
        return int((budget - least) / (length - least) * heads) if budget > least else 0

    def head_counts(
        self, layers: list[int], layer: int, length: int, budget: int, retrieving: int | None = None
    ) -> list[int]:
        """Return the entries kept by each head of `layer`, of `length`; `budget` on average over the heads of `layers`.

        retrieving: number of heads that have all entries; None for all.
        """
        order = sorted((-score, i, j) for i in layers for j, score in enumerate(self.heads[i]))
        budget = min(budget, length)
        able = self.retrieving(len(order), length, budget)
        retrieving = able if retrieving is None else min(able, retrieving)
        streaming = len(order) - retrieving
        share, more = divmod(budget * len(order) - retrieving * length, max(streaming, 1))
        ranks = {(i, j): rank for rank, (_, i, j) in enumerate(order)}
        own = [ranks[layer, head] for head in range(len(self.heads[layer]))]
        return [length if rank < retrieving else share + (rank - retrieving < more) for rank in own]

    def scores(self, ctx: LayerContext) -> Tensor:
        batch, heads, length = ctx.keys.shape[:3]
        return torch.arange(length, dtype=torch.float32, device=ctx.keys.device).expand(batch, heads, length)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        check_heads(self, "scores", self.heads, ctx.num_layers, ctx.keys.shape[1] * ctx.ranks.size)
        if skips(self.skip_layers, ctx):
            return None
        if not self._share_out(ctx, counts):
            return None
        scores = self.scores(ctx).clone()
        firsts = [self._firsts(count) for count in counts]
        for row, count in enumerate(firsts):
            sinks = first_real(ctx, count)
            scores[row].masked_fill_(sinks[row if len(sinks) > 1 else 0], float("inf"))
        if ctx.valid is not None:
            scores = scores.masked_fill(~ctx.valid, float("-inf"))
        scores, _ = apply_protection(ctx, scores, counts)
        if ctx.valid is None and ctx.protected is None and ctx.quotas is None:
            kept = torch.maximum(ctx.state["streaming"], torch.tensor(firsts)[:, None]).clamp(max=scores.shape[-1])
            mask = top_mask(scores, kept)
            selection = pack_ragged(mask, kept.tolist())
        else:
            kept = torch.maximum(ctx.state["streaming"].to(scores.device), scores.isposinf().sum(-1))
            mask = top_mask(scores, kept)
            mask = mask if ctx.valid is None else mask & ctx.valid
            selection = pack_ragged(mask)
        if self.compensate:
            selection = _compensated(ctx, scores, mask, selection)
        left = selection.lengths or (selection.indices.shape[-1],) * len(counts)
        ctx.state["lost"] += torch.tensor(ctx.stored) - torch.tensor(ctx.ranks.most(left))
        return selection

    def _firsts(self, count: int) -> int:
        return min(self.sinks, count // 5 if count <= self.sinks + self.recent else self.sinks)

    def _share_out(self, ctx: LayerContext, counts: tuple[int, ...]) -> bool:
        """Record the limits of streaming heads, [B, H] in the layer's state; return False if no head has lost entries.

        At the end of a prompt, and during decode for a row that grows beyond its budget. Every layer computes the same
        numbers: retrieval heads have all entries, except the `lost` ones missing in the fullest head, and streaming
        heads have equal numbers, up to one.
        """
        heads = ctx.keys.shape[1] * ctx.ranks.size
        may = ctx.layers or range(ctx.num_layers)
        layers = [index for index in may if not skipped(self.skip_layers, index, ctx.num_layers)]
        every = len(layers) * heads
        endless = torch.iinfo(torch.int64).max
        state = ctx.state
        zeros = torch.zeros(len(counts), dtype=torch.int64)
        retrieving = state.get("retrieving", zeros + every).clone()
        streaming = state.get("streaming", torch.full((len(counts), ctx.keys.shape[1]), endless)).clone()
        state["lost"] = state.get("lost", zeros).clone()
        for row, (stored, lost, count) in enumerate(zip(ctx.stored, state["lost"].tolist(), counts, strict=True)):
            before = int(retrieving[row])
            length = stored + lost
            if ctx.step.phase == "decode" and before < every:
                continue
            retrieving[row] = min(before, self.retrieving(every, length, count))
            kept = torch.tensor(self.head_counts(layers, ctx.layer_idx, length, count, before))[ctx.ranks.own(heads)]
            # Heads that retrieve grow with every token that is generated.
            streaming[row] = kept.masked_fill(kept >= length, endless)
        state["retrieving"], state["streaming"] = retrieving, streaming
        return bool((retrieving < every).any())


def _compensated(ctx: LayerContext, scores: Tensor, mask: Tensor, selection: Selection) -> Selection:
    """Let the oldest recent entry of heads that drop some, and keep another recent one, stand for these, too.

    scores: [B, H, N], +inf for entries that stay as they are. mask: bool, the kept ones, in `selection`.
    """
    drops = ~mask if ctx.valid is None else ~mask & ctx.valid
    recent = mask & ~scores.isposinf()
    merges = drops.any(-1, keepdim=True) & (recent.sum(-1, keepdim=True) > 1)
    oldest = scores.masked_fill(~recent, float("inf")).argmin(-1, keepdim=True)
    weight = torch.ones_like(scores) if ctx.log_weight is None else ctx.log_weight.exp()
    weight = weight * drops.scatter(2, oldest, True)
    total = weight.sum(-1, keepdim=True)
    at = merges & (selection.indices == oldest)
    written: dict[str, Any] = {}
    for name, part in (("keys", ctx.keys), ("values", ctx.values)):
        mean = (weight / total)[:, :, None].to(score_dtype(part.dtype)) @ part.to(score_dtype(part.dtype))
        written[name] = mean.to(part.dtype).where(at[..., None], entries_at(part, selection.indices))
    before = torch.zeros_like(scores) if ctx.log_weight is None else ctx.log_weight
    return replace(selection, **written, log_weight=total.log().where(at, entries_at(before, selection.indices)))


@register_method("duoattention", title="DuoAttention", paper="arXiv 2410.10819", phase="end of prompt", part="heads")
def duoattention(
    budget: Budget | str | int | float = "50%",
    profile: Profile | str | os.PathLike[str] | None = None,
    sinks: int = 128,
    recent: int = 256,
    compensate: bool = False,
) -> Plan:
    """Keep all entries in retrieval heads, sinks and recent entries in the others; needs a model's profile."""
    heads, model = array_of("heads", "duoattention", profile)
    own: dict[str, Any] = {"sinks": sinks, "recent": recent, "compensate": compensate}
    return Plan(evict=DuoAttention(budget=Budget.parse(budget), heads=heads, **own), profile=model)
