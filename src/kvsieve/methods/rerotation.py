"""Key re-rotation for any evictor that ranks entries: kept keys move to the contiguous positions 0, 1, ...

A prompt is a context and its question, the last `question_tokens`. The base chooses among the entries of the context,
as if that were the whole prompt. Kept keys are rotated to their places among the kept ones, then the question is
prefilled after them, and the conversation continues from there: positions never exceed the entries stored. With
`chunk_length` the context is compressed chunk by chunk, as in Finch (arXiv 2408.00167), each chunk to its share of the
budget.

Differences from the reference (kvpress' KeyRerotationPress and ChunkPress): the question's entries count in the budget;
chunks of a context are compressed together with the entries kept so far; keys rotate in float32.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvsieve.core.selection import select_top
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor
from kvsieve.lazy import functional as F
from kvsieve.methods.base import ScoredEvictor, Wrapper, apply_protection, check_int, hide_padding, scored_by_name
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import ChunkedEvictor, Traits
from kvsieve.types import END_OF_PROMPT, LayerContext, Quotas, Selection

_WHOLE = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Rerotation(ChunkedEvictor, needs=("rotary",), heads="own", query_aware=False):
    """Keep `base`'s choice at contiguous positions: ``Rerotation(base=SnapKV(budget=0.2))``.

    base: ranks entries at the end of a prompt, in every layer and by nothing but the layer's queries, keys and values;
    it has the budget, in which the question counts. question_tokens: last tokens, at least 1, that stay and are not
    shown to the base. chunk: tokens of the context per step; None for all at once.
    """

    base: ScoredEvictor | Wrapper
    question_tokens: int = 1
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_int(self, "question_tokens", self.question_tokens, 1)
        if self.chunk is not None:
            check_int(self, "chunk", self.chunk, 1)
        base = self.base
        fine = isinstance(base, (ScoredEvictor, Wrapper))
        if not fine or type(base).select not in (ScoredEvictor.select, Wrapper.select):
            raise PlanError(
                f"Rerotation: base must be an evictor that keeps its best-ranked entries, such as SnapKV(budget=0.2), "
                f"got {base!r}"
            )
        same = base.skip_layers in (0, ()) and not base.traits.ragged and base.stored_heads(1, 2) == 1
        if base.when != END_OF_PROMPT or "hidden" in base.traits.needs or not same:
            raise PlanError(
                "Rerotation: base must act at the end of a prompt only and keep equally many entries in all layers and "
                f"KV heads, as SnapKV(budget=0.2) does without every= and skip_layers=; got {base!r}"
            )
        self.budget.refuse_fewer(
            self.minimum, "Rerotation", f"the question of {self.question_tokens} and the base's {base.minimum}"
        )

    @property
    def traits(self) -> Traits:
        base = self.base.traits
        needs = tuple(dict.fromkeys(("rotary", *base.needs)))
        return dataclasses.replace(base, needs=needs, fixed_counts=False, remembers=False)

    @property
    def budget(self) -> Budget:
        return self.base.budget

    @property
    def chunk_length(self) -> int:
        return _WHOLE if self.chunk is None else self.chunk

    @property
    def window(self) -> int:
        return self.question_tokens + self.base.window

    @property
    def minimum(self) -> int:
        return self.question_tokens + self.base.minimum

    def check(self, num_layers: int) -> None:
        super().check(num_layers)
        self.base.check(num_layers)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection:
        """Return the ``counts[b]`` best entries of each head before the question's; see roles.ChunkedEvictor."""
        context = self._without_question(ctx)
        kept = tuple(map(min, counts, context.stored))
        ranks = hide_padding(context, self.base.ranks(context, kept))
        ranks = F.pad(ranks, (0, self.question_tokens), value=float("-inf"))
        return select_top(*apply_protection(ctx, ranks, counts))

    def _without_question(self, ctx: LayerContext) -> LayerContext:
        part = slice(None, -self.question_tokens)

        def before(entries: Tensor | None) -> Tensor | None:
            return None if entries is None else entries[:, :, part]

        counts = [self.question_tokens] * len(ctx.stored)
        if ctx.valid is not None:
            counts = ctx.valid[:, 0, -self.question_tokens :].sum(-1).tolist()
        quotas = ctx.quotas
        return dataclasses.replace(
            ctx,
            query=ctx.query[:, :, part],
            keys=ctx.keys[:, :, part],
            values=ctx.values[:, :, part],
            index=ctx.index[:, :, part],
            valid=before(ctx.valid),
            stored=tuple(stored - count for stored, count in zip(ctx.stored, counts, strict=True)),
            protected=before(ctx.protected),
            quotas=None if quotas is None else Quotas(quotas.segment[:, :, part], quotas.counts),
        )


@register_method("rerotation", title="Key re-rotation", paper="", phase="prefill")
def rerotation(
    budget: Budget | str | int | float = "20%",
    base: str = "snapkv",
    question_tokens: int = 1,
    chunk_length: int | None = None,
) -> Plan:
    """Keep entries by the scores of another method, `base`, with kept keys moved to contiguous positions."""
    evictor = scored_by_name("rerotation", base, budget, 0, None)
    return Plan(evict=Rerotation(base=evictor, question_tokens=question_tokens, chunk=chunk_length))
