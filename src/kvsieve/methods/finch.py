"""Finch: Prompt-guided Key-Value Cache Compression (arXiv 2408.00167).

A prompt is a context and its question, the last tokens. The context is prefilled chunk by chunk, each as [kept entries
| chunk | question]. The question's queries score kept entries and chunk: softmax over all visible entries, each query's
row times the number of entries it sees, so that all rows count equally, mean over the queries and the query heads of a
group. The best of every KV head stay, up to the budget's share of the context so far; the question is removed, and the
kept keys are re-rotated to the contiguous positions 0, 1, ... before the next chunk. Memory and positions thus never
exceed budget, chunk and question. In the end the question is prefilled permanently, and the conversation continues
after it.

On a later turn the whole conversation is prefilled again with its new question. If the question is unknown, as in
evaluations that hide it, the context's last tokens replace it.

Differences from the reference: entries dropped in an earlier chunk stay dropped; the share of a budget is exact at the
end and rounded down before; rows of a batch have separate chunks and shares; keys rotate in float32, ties to the lower
slot. Models with sliding windows are refused: their layers cannot move entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.queries import query_mass
from kvsieve.core.scoring import group_mean
from kvsieve.core.selection import select_top
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import apply_protection, check_int, hide_padding
from kvsieve.methods.stays import Stays
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import ChunkedEvictor
from kvsieve.types import LayerContext, Selection


@dataclass(frozen=True, kw_only=True)
class Finch(Stays, ChunkedEvictor, needs=("rotary",), heads="own", takes_quotas=True, query_aware=True):
    """Prefill a context chunk by chunk, keeping the entries that the question attends to.

    budget: entries stored at the end of the prompt, including the question's. question_tokens: length of the question
    at the prompt's end, at least 1, always kept. chunk_length: tokens of the context per step.
    """

    stays = ("question_tokens",)

    budget: Budget
    question_tokens: int
    chunk_length: int = 1024

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        check_int(self, "question_tokens", self.question_tokens, 1)
        check_int(self, "chunk_length", self.chunk_length, 1)
        self.budget.refuse_fewer(self.minimum, "Finch", self.why_minimum)

    @property
    def window(self) -> int:
        return self.question_tokens

    def scores(self, ctx: LayerContext) -> Tensor:
        """Return the question's scores of the entries before it, [B, H, N - question]."""
        count = self.question_tokens
        length = ctx.keys.shape[2]
        slots = torch.arange(length, device=ctx.keys.device)
        visible = (slots <= slots[-count:, None])[None, None]
        if ctx.valid is not None:
            visible = visible & ctx.valid[:, :, None] & ctx.valid[:, :, -count:, None]
        asking = visible.any(-1)
        weights = visible.sum(-1) / asking.sum(-1, keepdim=True).clamp_min(1)
        query = ctx.query[:, :, -count:]
        before = length - count
        mass = query_mass(ctx.asks(query), ctx.keys, visible, weights=weights, entries=before)
        return group_mean(mass, ctx.keys.shape[1])

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection:
        """Return the ``counts[b]`` best entries of each head before the question's; see roles.ChunkedEvictor."""
        scores = torch.nn.functional.pad(self.scores(ctx), (0, self.question_tokens), value=float("-inf"))
        return select_top(*apply_protection(ctx, hide_padding(ctx, scores), counts))


@register_method("finch", title="Finch", paper="arXiv 2408.00167", phase="prefill", example={"question_tokens": 32})
def finch(
    budget: Budget | str | int | float = "25%", question_tokens: int | None = None, chunk_length: int = 1024
) -> Plan:
    """Compress chunk by chunk by the question's attention; kept keys get contiguous positions."""
    if question_tokens is None:
        raise PlanError(
            "finch reads a context in the light of its question: say how many of the prompt's last tokens it is, e.g. "
            "question_tokens=32"
        )
    return Plan(evict=Finch(budget=Budget.parse(budget), question_tokens=question_tokens, chunk_length=chunk_length))
