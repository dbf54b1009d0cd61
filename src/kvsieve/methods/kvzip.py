"""KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction (arXiv 2505.23416).

The model is made to repeat its context: after prefill, every chunk of it is fed once more, after a request to repeat it
and, from the second chunk, the last 8 tokens of the chunk before. An entry's score is the largest attention it gets
from any of the tokens fed and any query head of its group, in a softmax over the prefix, the chunk and the tokens fed.
Fed tokens are not stored. The best entries of all layers and heads together stay, so that heads keep different numbers,
or the best of each head (`uniform=True`). The choice does not depend on the text after the prompt, so it serves any
question.

Chunks cover the whole conversation: on a later turn it is repeated again; dropped entries stay dropped. Repeating costs
as much as the prefill, or up to twice that.

Differences from the reference: the prefix is protected at any length; the total is exact, ties go to the lower layer,
head and slot; each row of a batch has chunks of its own tokens; the end of a prompt is repeated with it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from kvsieve.core.queries import query_mass
from kvsieve.core.selection import entries_at, pack_ragged, select_top, top_mask
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import apply_protection, check_int, first_real, hide_padding, parse_layers, skips
from kvsieve.methods.repeating import RepeatingEvictor, side_by_side
from kvsieve.planning.budget import Budget
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import ProbePasses, Traits
from kvsieve.types import LayerContext, Ranks, Selection

# Tokens of the chunk before, fed before a chunk.
_LEAD = 8
_STATE = "kvzip"


@register_method(
    "kvzip",
    title="KVzip",
    paper="arXiv 2505.23416",
    phase="end of prompt",
    query_aware=False,
    summary="Keep the entries the model needs to repeat its context, for any question.",
    budget="30%",
)
@dataclass(frozen=True, kw_only=True)
class KVzip(RepeatingEvictor, heads="all", ragged=True, takes_quotas=True, query_aware=False):
    """Keep the entries that the model needs to repeat its context.

    budget: entries per layer and KV head, including the prefix, on average over layers and heads unless ``uniform``.
    prefix: first tokens that always stay, such as a system prompt, at least 1. chunk_length: tokens repeated at once.
    uniform: the same number in every head. repeat_ids, go_on_ids: token ids of the requests to repeat, before the first
    chunk and before later ones, each followed by the last 8 tokens of the chunk before; answer_ids: the chat template's
    header of an answer; () for nothing. None is filled in by `repeat_requests` with a tokenizer (``attach(model, plan,
    tokenizer=tokenizer)``, a chat, the command line, evaluations), which a prompt requires. skip_layers: layers that
    keep all, not counted.
    """

    budget: Budget
    prefix: int = 4
    chunk_length: int = 2048
    uniform: bool = False
    go_on_ids: tuple[int, ...] | None = None
    skip_layers: int | tuple[int, ...] = 0

    @property
    def traits(self) -> Traits:
        own = self.TRAITS
        return replace(own, ragged=False, heads=own.heads and "own") if self.uniform else own

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        check_int(self, "prefix", self.prefix, 1)
        check_int(self, "chunk_length", self.chunk_length, 1)
        super().__post_init__()
        object.__setattr__(self, "skip_layers", parse_layers(self, self.skip_layers))
        self.budget.refuse_fewer(self.minimum, "KVzip", f"the prefix of {self.prefix} and one more")

    @property
    def minimum(self) -> int:
        return self.prefix + 1

    @property
    def probe_tokens(self) -> int:
        longest = max(len(self.repeat_ids or ()), len(self.go_on_ids or ()) + _LEAD)
        return longest + len(self.answer_ids or ()) + self.chunk_length

    @property
    def requests(self) -> dict[str, tuple[int, ...] | None]:
        return {**super().requests, "go_on_ids": self.go_on_ids}

    @property
    def probe_identity(self) -> KVzip:
        # Scores cover the whole prompt, however much of it stays.
        return replace(self, budget=Budget(ratio=1.0), uniform=False)

    def probe(self, passes: ProbePasses) -> None:
        numbers = (passes.real.long().cumsum(-1) - 1).masked_fill(~passes.real, -1)
        whole = passes.branch()
        whole.read_rest()
        scores: dict[int, Tensor] = {}
        for start in range(0, int(numbers.max()) + 1, self.chunk_length):
            rows = [self.fed(ids[real], start) for ids, real in zip(passes.ids, passes.real, strict=True)]
            ids, real = side_by_side(rows, passes)
            observe = functools.partial(self._score, scores, numbers, start)
            whole.branch().feed(ids, real, observe=observe)
        for index, layer in scores.items():
            passes.state(index)[_STATE] = layer
            passes.state(index)["kvzip_closes"] = index == max(scores)

    def fed(self, tokens: Tensor, start: int) -> Tensor:
        """Return the tokens that repeat the chunk from `start` of a row's `tokens` [n], without padding, or none."""
        chunk = tokens[start : start + self.chunk_length]
        if not len(chunk):
            return chunk
        request = (self.go_on_ids if start else self.repeat_ids) or ()
        before = [*request, *tokens[max(0, start - _LEAD) : start].tolist(), *(self.answer_ids or ())]
        return torch.cat([chunk.new_tensor(before), chunk])

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
        return self._threshold(layers, counts, ctx.ranks) if closes else None

    def _threshold(
        self, layers: dict[int, tuple[Tensor, int]], counts: tuple[int, ...], ranks: Ranks
    ) -> dict[int, Selection]:
        """Return the best entries of all layers and heads together, by layer.

        layers: per layer the scores [B, H, N] of all heads, and the number of this rank's slots, the last of N.
        """
        device = next(iter(layers.values()))[0].device
        every = torch.cat([scores.flatten(1).to(device) for scores, _ in layers.values()], 1)
        heads = sum(scores.shape[1] for scores, _ in layers.values())
        total = torch.tensor(counts, device=device) * heads
        total = total.clamp(min=every.isposinf().sum(-1), max=(~every.isneginf()).sum(-1))
        masks = top_mask(every, total).split([scores[0].numel() for scores, _ in layers.values()], 1)
        chosen = {}
        for (index, (scores, size)), mask in zip(layers.items(), masks, strict=True):
            own = mask.view(scores.shape)[:, ranks.own(scores.shape[1]), -size:]
            if not bool(own.all()):
                chosen[index] = pack_ragged(own.to(scores.device))
        return chosen
