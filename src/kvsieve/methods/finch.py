"""Finch: Prompt-guided Key-Value Cache Compression (arXiv 2408.00167).

A prompt is a context and its question, the last tokens. The context is read chunk by chunk, each time as [what is kept
so far | chunk | question]. The question's queries score what is kept and the chunk: softmax over all they see, each
query's row times the number of entries it sees, so that later rows count as much as earlier ones, mean over the queries
and the query heads of a group. The best of every KV head stay, as many as the budget's share of what has been read;
the question is forgotten, and the keys kept are turned to the positions 0, 1, ... without gaps, after which the next
chunk follows. So neither memory nor positions ever exceed budget, chunk and question. At the end the question is read
for good, and the conversation goes on behind it.

On a later turn the whole conversation is read afresh in the light of its new end. Where a question is yet to come, as
in evaluations that hide it, the context's own last tokens stand for it.

Differences from the reference: what is dropped in an earlier chunk is gone; the share of a budget is exact at the end
and rounded down before; rows of a batch have chunks and shares of their own; keys turn in float32, ties to the lower
slot. Models with sliding windows are refused: their layers cannot move what they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.budget import Budget
from kvsieve.core.queries import query_mass
from kvsieve.core.scoring import group_mean
from kvsieve.core.selection import select_top
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import apply_protection, check_int, hide_padding
from kvsieve.plans import Plan
from kvsieve.registry import register_method
from kvsieve.roles import ChunkedEvictor
from kvsieve.types import LayerContext, Selection


@dataclass(frozen=True, kw_only=True)
class Finch(ChunkedEvictor, needs=("rotary",), heads="own", takes_quotas=True, query_aware=True):
    """Read a context in the light of its question, keeping of each chunk what the question attends to.

    budget: entries stored once the prompt is complete, the question's included. question_tokens: last tokens of the
    prompt that are its question, at least 1, always kept. chunk_length: tokens of the context per step.
    """

    budget: Budget
    question_tokens: int
    chunk_length: int = 1024

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", Budget.parse(self.budget))
        check_int(self, "question_tokens", self.question_tokens, 1)
        check_int(self, "chunk_length", self.chunk_length, 1)
        self.budget.refuse_fewer(self.minimum, "Finch", f"the question of {self.question_tokens} and one more")

    @property
    def window(self) -> int:
        return self.question_tokens

    @property
    def minimum(self) -> int:
        return self.question_tokens + 1

    def scores(self, ctx: LayerContext) -> Tensor:
        """[B, H, N - question]: what the question's queries make of the entries before theirs."""
        count, length = self.question_tokens, ctx.keys.shape[2]
        slots = torch.arange(length, device=ctx.keys.device)
        visible = (slots <= slots[-count:, None])[None, None]
        if ctx.valid is not None:
            visible = visible & ctx.valid[:, :, None] & ctx.valid[:, :, -count:, None]
        asking = visible.any(-1)
        weights = visible.sum(-1) / asking.sum(-1, keepdim=True).clamp_min(1)
        query, before = ctx.query[:, :, -count:], length - count
        mass = query_mass(ctx.asks(query), ctx.keys, visible, weights=weights, entries=before)
        return group_mean(mass, ctx.keys.shape[1])

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection:
        """The ``counts[b]`` best entries of each head of row b before the question's; see roles.ChunkedEvictor."""
        scores = torch.nn.functional.pad(self.scores(ctx), (0, self.question_tokens), value=float("-inf"))
        return select_top(*apply_protection(ctx, hide_padding(ctx, scores), counts))


@register_method(
    "finch",
    title="Finch",
    paper="arXiv 2408.00167",
    phase="prefill",
    query_aware=True,
    example={"question_tokens": 32},
)
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
