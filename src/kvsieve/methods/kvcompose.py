"""KVCompose: Efficient Structured KV Cache Compression with Composite Tokens (arXiv 2509.05165).

After prefill the model reads its context once more, after the context itself. A token's score in a query head is the
largest attention that any of these queries gives it; scores are averaged over the heads of a group, and their mean over
all KV heads of the layer is added. Each head sorts its own entries: the j-th best of all heads are a composite token,
scored by the mean over heads. The best composite tokens of all layers together stay, so that layers keep different
numbers and the heads of a layer the same. The first layer's j-th one scores the largest of all layers' j-th.

Differences from the reference (NVIDIA/kvpress): the context is read again in chunks, and attention is never stored;
every layer keeps its best composite token within the total, which the reference adds to it; ties go to the lower layer;
the whole conversation is read again on a later turn.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from kvsieve.core.queries import query_mass
from kvsieve.core.scoring import group_mean
from kvsieve.core.selection import select_top, top_mask
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.methods.base import apply_protection, at_entries, by_token, check_int, hide_padding, parse_layers, skips
from kvsieve.planning.budget import Budget
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import ProbePasses, ProbingEvictor
from kvsieve.types import LayerContext, Selection

_STATE = "kvcompose"


@register_method("kvcompose", title="KVCompose", paper="arXiv 2509.05165", phase="end of prompt", budget="30%")
@dataclass(frozen=True, kw_only=True)
class KVCompose(ProbingEvictor, heads="all", takes_quotas=True, query_aware=False):
    """Keep each head's entries that a second reading of the context attends to; layers share one budget.

    budget: entries per layer and KV head, on average over layers. chunk_length: tokens read again at once. skip_layers:
    layers that keep all, not counted.
    """

    budget: Budget
    chunk_length: int = 512
    skip_layers: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        check_int(self, "chunk_length", self.chunk_length, 1)
        object.__setattr__(self, "skip_layers", parse_layers(self, self.skip_layers))

    @property
    def probe_tokens(self) -> int:
        return self.chunk_length

    def probe_length(self, length: int) -> int:
        # The chunks of the whole conversation follow each other.
        return length

    @property
    def probe_identity(self) -> KVCompose:
        # Scores cover the whole prompt, however much of it stays.
        return replace(self, budget=Budget(ratio=1.0))

    def probe(self, passes: ProbePasses) -> None:
        again = passes.branch()
        again.read_rest()
        scores: dict[int, Tensor] = {}
        observe = functools.partial(self._score, scores)
        for start in range(0, int(passes.real.sum(-1).max()), self.chunk_length):
            part = slice(start, start + self.chunk_length)
            rows = [ids[real][part] for ids, real in zip(passes.ids, passes.real, strict=True)]
            size = max(map(len, rows))
            ids = passes.ids.new_zeros(len(rows), size)
            real = passes.real.new_zeros(len(rows), size)
            for row, fed in enumerate(rows):
                ids[row, : len(fed)], real[row, : len(fed)] = fed, True
            again.feed(ids, real, observe=observe)
        for index, layer in scores.items():
            passes.state(index)[_STATE] = layer
            passes.state(index)["kvcompose_closes"] = index == max(scores)

    def _score(self, scores: dict[int, Tensor], ctx: LayerContext) -> None:
        """Raise a layer's scores per query head, [B, Hq, N], to the attention of the tokens read again."""
        if skips(self.skip_layers, ctx):
            return
        fed = ctx.query.shape[2]
        known = scores.get(ctx.layer_idx)
        size = ctx.keys.shape[2] - fed if known is None else known.shape[2]
        slots = torch.arange(ctx.keys.shape[2], device=ctx.keys.device)
        visible = (slots <= slots[-fed:, None])[None, None]
        if ctx.valid is not None:
            visible = visible & ctx.valid[:, :, None] & ctx.valid[:, :, -fed:, None]
        mass = query_mass(ctx.asks(ctx.query), ctx.keys, visible, reduce="max", entries=size)
        scores[ctx.layer_idx] = mass if known is None else torch.maximum(known, mass)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> dict[int, Selection] | None:
        found = ctx.state.pop(_STATE, None)
        closes = ctx.state.pop("kvcompose_closes", False)
        if found is None:
            return None
        heads = ctx.keys.shape[1]
        scores = group_mean(found, heads)
        columns = by_token(ctx, scores.where(self._real(ctx), 0)).mean(1, keepdim=True)
        scores = scores + at_entries(ctx, ctx.ranks.mean(columns), heads)
        ranking = apply_protection(ctx, hide_padding(ctx, scores), counts)[0]
        composite = ctx.ranks.gather(ranking).sort(-1, descending=True).values.mean(1)
        layers: dict[int, tuple[Tensor, Tensor, tuple[int, ...]]] = ctx.shared.setdefault(_STATE, {})
        layers[ctx.layer_idx] = ranking, composite, ctx.stored
        return self._choose(layers, counts) if closes else None

    @staticmethod
    def _real(ctx: LayerContext) -> Tensor:
        return torch.ones_like(ctx.index, dtype=torch.bool) if ctx.valid is None else ctx.valid

    @staticmethod
    def _choose(
        layers: dict[int, tuple[Tensor, Tensor, tuple[int, ...]]], counts: tuple[int, ...]
    ) -> dict[int, Selection]:
        """Return the best composite tokens of all layers together, by layer: rankings, composite scores, entries."""
        longest = max(composite.shape[1] for _, composite, _ in layers.values())
        device = next(iter(layers.values()))[1].device
        padded = [
            F.pad(composite, (0, longest - composite.shape[1]), value=float("-inf")).to(device)
            for _, composite, _ in layers.values()
        ]
        every = torch.stack(padded, 1)
        every[:, 0] = every.amax(1).masked_fill(every[:, 0].isneginf(), float("-inf"))
        every[..., 0] = float("inf")
        flat = every.flatten(1)
        most = (~flat.isneginf()).sum(-1)
        total = (torch.tensor(counts, device=device) * len(layers)).clamp(min=flat.isposinf().sum(-1)).minimum(most)
        sizes = top_mask(flat, tuple(total.tolist())).view_as(every).sum(-1)
        chosen = {}
        for (index, (ranking, _, stored)), kept in zip(layers.items(), sizes.T.tolist(), strict=True):
            if tuple(kept) != stored:
                chosen[index] = select_top(ranking, tuple(kept))
        return chosen
