"""SpecPrefill (arXiv 2502.02789).

Speculative Prefill: Turbocharging TTFT with Lightweight and Training-Free Token Importance Estimation.

A second, smaller model prefills the prompt and drafts a few tokens of an answer. A prompt token's importance is its
attention there: softmax weights, smoothed along the sequence, the maximum over all layers and heads, then the mean over
the drafting queries. Chunks of neighbours are ranked by their mean, and the model itself prefills only the tokens of
the best ones, in order and at their original positions.

The draft may have another tokenizer, unlike in the paper (Cross-Family Speculative Prefill, arXiv 2603.02631, finds
that importance transfers): it gets the same text, and a token of the model takes the largest score among the draft's
tokens that share characters with it.

Differences from the paper: the prompt's last token casts the first vote, so that `lookahead` queries take one pass
less; the last `keep_last` tokens are always kept; the number of tokens is exact, so the last chunk chosen may be cut;
batches, padding and later turns: the draft prefills the whole conversation again, and chooses among the turn's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from kvsieve.core.scoring import WIDEST, mass_of, pool
from kvsieve.core.selection import select_top
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import apply_protection, check_int
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.planning.roles import DraftPropagator, Loaded, draft_of
from kvsieve.types import LayerContext, Selection


@dataclass(frozen=True, kw_only=True)
class SpecPrefill(DraftPropagator, heads="all", query_aware=True):
    """Prefill only the tokens that a smaller model attends to when it drafts an answer.

    draft: that model; "demo", a directory or hub id, a loaded model, or (model, tokenizer). keep: tokens to prefill; a
    Budget, a share ("20%", 0.2) or a number (1024) of the turn's prompt. lookahead: queries that vote, of the prompt's
    last token and of drafted ones. smooth: odd width of the average over neighbours. chunk_length: neighbours kept
    together. keep_last: last tokens always kept, within `keep`. own: the model's tokenizer, filled in by `attach`.
    """

    draft: Any
    keep: Budget
    lookahead: int = 8
    smooth: int = 13
    chunk_length: int = 32
    keep_last: int = 32
    own: Loaded | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", draft_of(self.draft))
        object.__setattr__(self, "keep", Budget.parse(self.keep, "keep"))
        self.keep.refuse_bytes("SpecPrefill", "keep", "it counts tokens that are read, not what is stored")
        check_int(self, "lookahead", self.lookahead, 1, most=1024)
        check_int(self, "smooth", self.smooth, 1, most=WIDEST, odd=True)
        check_int(self, "chunk_length", self.chunk_length, 1)
        check_int(self, "keep_last", self.keep_last, 1)
        if self.keep.tokens is not None and self.keep.tokens < self.keep_last:
            raise PlanError(
                f"SpecPrefill: {self.keep.tokens} tokens are too few for keep_last={self.keep_last}; raise keep="
            )

    def drafter(self) -> str | Loaded:
        drafter: str | Loaded = self.draft
        return drafter

    def own_tokenizer(self) -> Loaded | None:
        return self.own

    def steps(self) -> int:
        return self.lookahead

    def entries(self, length: int) -> int:
        return min(length, self.keep.entries(length, self.keep_last))

    @property
    def lacks_tokenizer(self) -> bool:
        own = isinstance(self.draft, str) or self.draft.tokenizer is not None
        return own and self.own is None

    def for_tokenizer(self, tokenizer: Any) -> Self:
        return replace(self, own=Loaded(None, None, tokenizer))

    def observe(self, ctx: LayerContext, prompt: int, seen: dict[int, Any]) -> None:
        mass = mass_of(ctx, -1)
        best = pool(mass[..., :prompt], self.smooth, "avg").amax(1)[0].float()
        query = ctx.keys.shape[2] - prompt
        seen[query] = torch.maximum(seen[query], best) if query in seen else best

    def scores(self, seen: dict[int, Any]) -> Tensor:
        return torch.stack(list(seen.values())).mean(0)

    def select(self, ctx: LayerContext) -> Selection | None:
        if ctx.layer_idx >= 0:
            return None
        counts = tuple(map(self.entries, ctx.offered_counts))
        if counts == ctx.offered_counts:
            return None
        ctx.shared["report"] = {"draft": str(self.draft if isinstance(self.draft, str) else self.draft.name)}
        # Each process has its own draft, with possibly different last digits.
        scores = ctx.ranks.mean(ctx.shared["drafted"])
        ranked = torch.stack([self._by_chunks(row) for row in scores])
        # Protected tokens are kept as well, beyond `keep` if necessary.
        ranking, counts = apply_protection(ctx, ranked[:, None], counts, insist=True)
        return select_top(ranking[:, 0], counts)

    def _by_chunks(self, row: Tensor) -> Tensor:
        """Return scores [N] with the mean of its chunk for each token, and +inf for the last ones."""
        ranked = row.clone()
        real = ~row.isneginf()
        parts = row[real].split(self.chunk_length)
        ranked[real] = torch.cat([part.mean().expand(len(part)) for part in parts])
        ranked[real.nonzero()[-self.keep_last :, 0]] = float("inf")
        return ranked


@register_method(
    "specprefill",
    title="SpecPrefill",
    paper="arXiv 2502.02789",
    phase="prefill, end of prompt",
    example={"draft": "demo"},
)
@dataclass(frozen=True, kw_only=True)
class SpecPrefillParameters(Parameters):
    """Prefill only the tokens that a smaller model, `draft`, attends to; with `budget`, evict by SnapKV, too."""

    draft: Any
    keep: Budget | str | int | float = "20%"
    lookahead: int = 8
    smooth: int = 13
    chunk_length: int = 32
    keep_last: int = 32
    budget: Budget | str | int | float | None = None

    def plan(self) -> Plan:
        return Plan(propagate=self.role(SpecPrefill), evict=None if self.budget is None else self.role(SnapKV))
