"""FastGen: Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs (arXiv 2310.01801).

Every head gets the cheapest of five policies that recovers the share `recovery` of its attention: special tokens alone;
and punctuation; and the most attended tokens; and the most recent ones; everything. Heads store different numbers of
entries, and keep their policy during decode.

Differences from the reference: a policy recovers the attention of the last `window` queries on its entries,
which is 1 less half the L1 distance between the attention and that of the reduced cache; query heads of a group share
a policy, by their mean; `budget` is the number of most attended entries, and that of recent ones (30% each in the
paper); policies act at the end of prompts, and during decode every `every` tokens; punctuation is tokens of one mark.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvsieve.core.scoring import group_mean, mass_of
from kvsieve.core.selection import pack_ragged, top_mask
from kvsieve.errors import PlanError, short
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, at_entries, check_int, hide_padding, last_real, skips
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, Selection

# Marks that tokenizers write for a space.
_SPACES = " \u0120\u2581"
# Policies, by number.
_FREQUENT = 2
_FULL = 4


@register_method("fastgen", title="FastGen", paper="arXiv 2310.01801", phase="end of prompt", budget="30%")
@dataclass(frozen=True, kw_only=True)
class FastGen(ScoredEvictor, needs=("tokens",), heads="own", ragged=True, takes_quotas=False, query_aware=True):
    """Give each head the cheapest of five policies that recovers most of its attention.

    budget: most attended entries of the third policy, and recent entries of the fourth. recovery: share of attention,
    above 0 and at most 1. window: last queries of the prompt that profile heads. special_ids, punctuation_ids: token
    ids; None is filled in with a tokenizer (``attach(model, plan, tokenizer=tokenizer)``), which a prompt requires.
    """

    recovery: float = 0.95
    window: int = 32
    special_ids: tuple[int, ...] | None = field(default=None, repr=False)
    punctuation_ids: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_int(self, "window", self.window, 1)
        if not 0 < self.recovery <= 1:
            raise PlanError(f"FastGen: recovery must be a share above 0 and at most 1, got {self.recovery!r}")
        for name in ("special_ids", "punctuation_ids"):
            ids = vars(self)[name]
            if ids is not None:
                object.__setattr__(self, name, _ids(name, ids))
        super().__post_init__()
        self.budget.refuse_bytes("FastGen", "budget", "it is what two policies keep, and some heads keep everything")

    @property
    def lacks_tokenizer(self) -> bool:
        return self.special_ids is None or self.punctuation_ids is None

    def for_tokenizer(self, tokenizer: Any) -> FastGen:
        special = self.special_ids
        marks = self.punctuation_ids
        return replace(
            self,
            special_ids=tuple(sorted(set(tokenizer.all_special_ids))) if special is None else special,
            punctuation_ids=punctuation_of(tokenizer) if marks is None else marks,
        )

    def scores(self, ctx: LayerContext) -> Tensor:
        """Return the mean share of the last queries' attention that each entry gets, [B, H, N]."""
        window = min(self.window, ctx.query.shape[2])
        mass = group_mean(mass_of(ctx, -window), ctx.keys.shape[1])
        if ctx.valid is None:
            return mass / window
        return mass / ctx.valid[:, :, -window:].sum(-1, keepdim=True).clamp_min(1)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        prompt = ctx.step.phase == "prefill"
        real = torch.ones_like(ctx.index, dtype=torch.bool) if ctx.valid is None else ctx.valid.expand_as(ctx.index)
        whole = [prompt and count >= stored for count, stored in zip(counts, ctx.stored, strict=True)]
        stays = torch.tensor(whole).to(real.device, non_blocking=True)[:, None]
        scores = self.scores(ctx)
        masks = self.policies(ctx, scores, counts, real)
        if prompt:
            recovered = (masks * scores).sum(-1)
            enough = torch.cat([recovered[:_FULL] >= self.recovery, torch.ones_like(recovered[:1], dtype=torch.bool)])
            policy = enough.to(torch.uint8).argmax(0)
            # A prompt within the budget keeps all entries, and later the most attended ones at least.
            policy = policy.where(~stays, policy.clamp_min(_FREQUENT))
        else:
            policy = ctx.state["policy"].to(masks.device, non_blocking=True)
        kept = masks.gather(0, policy[None, :, :, None].expand(1, *masks.shape[1:]))[0] | stays[..., None]
        kept = kept & real
        if ctx.protected is not None:
            kept = kept | (ctx.protected & real)
        policies, counts_kept, stored = torch.stack([policy, kept.sum(-1), real.sum(-1)]).cpu()
        ctx.state["policy"] = policies.clone()
        return None if torch.equal(counts_kept, stored) else pack_ragged(kept, counts_kept.tolist())

    def policies(self, ctx: LayerContext, scores: Tensor, counts: tuple[int, ...], real: Tensor) -> Tensor:
        """Return the entries of each policy, from the cheapest to the full one, bool [5, B, H, N]."""
        assert ctx.ids is not None
        ids = at_entries(ctx, ctx.ids.to(ctx.index.device)[:, None], ctx.index.shape[1])
        special, marks = (
            torch.isin(ids, torch.tensor(known or (), dtype=ids.dtype).to(ids.device, non_blocking=True)) & real
            for known in (self.special_ids, self.punctuation_ids)
        )
        frequent = top_mask(hide_padding(ctx, scores), counts) & real
        recent = last_real(ctx, counts).expand_as(real)
        masks = [special]
        for more in (marks, frequent, recent, real):
            masks.append(masks[-1] | more)
        return torch.stack(masks)


def punctuation_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of a tokenizer's tokens that are one punctuation mark, with or without a space before it."""
    special = set(tokenizer.all_special_ids)
    marks = {mark for char in string.punctuation for mark in (char, *(space + char for space in _SPACES))}
    return tuple(sorted({number for token, number in tokenizer.get_vocab().items() if token in marks} - special))


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, Sequence) and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise PlanError(f"FastGen: {name} must be token ids such as (12, 7), got {short(value)}")
