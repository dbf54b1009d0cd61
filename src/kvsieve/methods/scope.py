"""SCOPE: Optimizing Key-Value Cache Compression in Long-context Generation (arXiv 2412.13649).

Prompt and answer have separate budgets. The prompt is compressed once, at its end, by any other method, `base`; its
entries then stay. Of the answer, the `recent` newest entries stay, and of its older ones those with the most attention
from the newest query (softmax over all entries, group mean). Strategies:

- "slide": `answer` entries in all, chosen after every token.
- "adaptive": `recent` entries, and one more for each `interval` generated tokens.
- "discontinuous": as "adaptive", chosen after every `interval` tokens only.

Differences from the reference: one set per KV head, where the original has one per query head; "discontinuous" counts
its `interval` tokens from the prompt's end instead of from the last choice on, with a pass in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsieve.core.scoring import group_mean, mass_of
from kvsieve.core.selection import pack_ragged, top_mask
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import (
    apply_protection,
    check_int,
    hide_padding,
    last_real,
    plan_of_base,
    refuse_unused,
    skips,
)
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import DelegatingEvictor, Evictor
from kvsieve.types import END_OF_PROMPT, LayerContext, Selection, When

Strategy = Literal["slide", "adaptive", "discontinuous"]


@dataclass(frozen=True, kw_only=True)
class Scope(DelegatingEvictor, heads="own", query_aware=True):
    """Compress the prompt once by `base`, and bound the answer by a budget of its own.

    base: acts at the end of prompts only. answer: entries of the answer under "slide"; a number, or a share of its
    tokens so far. recent: newest entries of the answer, always kept. strategy, interval: see the module.
    """

    answer: Budget = Budget(tokens=1024)
    recent: int = 256
    strategy: Strategy = "slide"
    interval: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base.when != END_OF_PROMPT or self.base.traits.is_view:
            raise PlanError(
                f"Scope: base must evict at the end of prompts only, such as SnapKV(budget=0.2), got {self.base!r}"
            )
        check_int(self, "recent", self.recent, 1)
        check_int(self, "interval", self.interval, 1)
        object.__setattr__(self, "answer", Budget.parse(self.answer, "answer"))
        if self.strategy != "slide":
            refuse_unused(self, f"strategy={self.strategy!r}", "answer")
            return
        refuse_unused(self, "strategy='slide'", "interval")
        self.answer.refuse_bytes("Scope", "answer", "an answer's length is not known in advance")
        self.answer.refuse_fewer(self.recent + 1, "Scope", f"{self.recent} recent ones and one more", "answer")

    @property
    def when(self) -> When:
        return When(steps=self.interval if self.strategy == "discontinuous" else 1)

    def rhythm(self, prompt: int) -> tuple[int, int] | None:
        return Evictor.rhythm(self, prompt)

    @property
    def keeps_prompt(self) -> bool:
        return True

    def answer_entries(self, generated: int, prompt: int, budget: int) -> int:
        if self.strategy == "slide":
            return self.answer.entries(generated, self.recent + 1)
        return self.recent + (generated - 1) // self.interval

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | dict[int, Selection] | None:
        if ctx.step.phase == "prefill":
            return self.base.select(ctx, counts)
        stored = zip(counts, ctx.stored, strict=True)
        if skips(self.skip_layers, ctx) or all(count >= entries for count, entries in stored):
            return None
        scores = hide_padding(ctx, group_mean(mass_of(ctx, -1), ctx.keys.shape[1]))
        scores = scores.masked_fill(last_real(ctx, self.recent), float("inf"))
        scores, counts = apply_protection(ctx, scores, counts)
        # Heads may hold different numbers of the prompt's entries; of the answer's they keep equally many.
        held = scores.isposinf().sum(-1)
        limits = torch.tensor(counts).to(held.device, non_blocking=True)[:, None] - held.amax(-1, keepdim=True) + held
        return pack_ragged(self._best(scores, limits))

    @staticmethod
    def _best(scores: Tensor, limits: Tensor) -> Tensor:
        return top_mask(scores, limits.cpu()) & ~scores.isneginf()

    def is_noop(self, layer_idx: int, num_layers: int, stored: tuple[int, ...], state: dict[str, object]) -> bool:
        return False


@register_method("scope", title="SCOPE", paper="arXiv 2412.13649", phase="end of prompt, decode")
def scope(
    budget: Budget | str | int | float = "20%",
    base: str = "snapkv",
    answer: Budget | str | int | float = 1024,
    recent: int = 256,
    strategy: Strategy = "slide",
    interval: int = 15,
) -> Plan:
    """Compress the prompt once by another method, `base`, and bound the answer by a budget of its own."""
    plan = plan_of_base("scope", base, budget=budget)
    if plan.roles != ("evict",) or plan.evict is None:
        raise PlanError(f"scope: base must name a method that only evicts, e.g. snapkv; got {base!r}")
    return Plan(
        evict=Scope(
            base=plan.evict,
            answer=Budget.parse(answer, "answer"),
            recent=recent,
            strategy=strategy,
            interval=interval,
        )
    )
