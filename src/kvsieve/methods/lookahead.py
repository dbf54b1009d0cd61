"""Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query (arXiv 2505.20334).

A draft of the answer predicts its attention. After prefill, SnapKV reduces a copy of the cache, from which a few tokens
are generated greedily. Their queries then score the whole prompt, as SnapKV's window does: softmax mass over the
prompt's entries, pooled along the sequence, shared by the query heads of a group. Drafted tokens and copy are deleted.
The local window's queries vote as well ("LAQ++"), unless `local=False`. The window's own entries stay in either case.

On a later turn the draft follows the whole conversation so far.

Differences from the reference: drafted tokens are no keys of the scoring softmax; a row with a shorter draft votes with
fewer queries; one index set per KV head; scores in float32, ties to the lower slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.queries import query_mass
from kvsieve.core.scoring import Kernel, Pool, group_mean, pool
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.planning.roles import ProbePasses, ProbingEvictor
from kvsieve.types import LayerContext, Selection

_STATE = "lookahead"
_REAL = "lookahead_real"


@dataclass(frozen=True, kw_only=True)
class Lookahead(SnapKV, ProbingEvictor, heads="own", query_aware=True):
    """Keep the entries that a draft of the answer attends to, and the prompt's last `window`.

    lookahead: tokens drafted, at least 1. draft: entries of the reduced copy, a Budget, a share or a number; None for
    `budget`. local: the prompt's last `window` queries vote too. window, kernel, pooling: as SnapKV's, for the draft
    and for the final choice.
    """

    lookahead: int = 8
    draft: Budget | None = None
    local: bool = True

    def __post_init__(self) -> None:
        check_int(self, "lookahead", self.lookahead, 1, most=1024)
        if self.draft is not None:
            object.__setattr__(self, "draft", Budget.parse(self.draft, "draft"))
            self.draft.refuse_bytes("Lookahead", "draft", "it is dropped again before the answer")
        super().__post_init__()
        if self.every is not None:
            raise PlanError("Lookahead drafts once a prompt is complete, not while decoding: leave every= out")
        if self.per_query_head:
            raise PlanError("Lookahead keeps one set per KV head: leave per_query_head out")
        self._drafter()

    @property
    def probe_tokens(self) -> int:
        return self.window + self.lookahead

    def _drafter(self) -> SnapKV:
        return SnapKV(
            budget=self.draft or self.budget,
            window=self.window,
            kernel=self.kernel,
            pooling=self.pooling,
            skip_layers=self.skip_layers,
        )

    def probe(self, passes: ProbePasses) -> None:
        branch = passes.branch()
        logits = branch.read_rest(evict=self._drafter(), logits=True)
        queries: dict[int, list[Tensor]] = {}
        real = []
        going = torch.ones(len(passes.ids), dtype=torch.bool, device=passes.ids.device)
        ends = torch.tensor(sorted(passes.ends), dtype=torch.int64, device=going.device)
        for left in reversed(range(self.lookahead)):
            assert logits is not None
            token = logits.argmax(-1)
            real.append(going)
            going = going & ~torch.isin(token, ends)
            logits = branch.feed(
                token[:, None],
                observe=lambda ctx: queries.setdefault(ctx.layer_idx, []).append(ctx.query),
                logits=left > 0,
            )
        for index, parts in queries.items():
            passes.state(index)[_STATE] = torch.cat(parts, 2)
            passes.state(index)[_REAL] = torch.stack(real, 1)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        selection = super().select(ctx, counts)
        ctx.state.pop(_STATE, None), ctx.state.pop(_REAL, None)
        return selection

    def context_scores(self, ctx: LayerContext) -> Tensor:
        drafted = ctx.state.get(_STATE)
        if drafted is None:
            return super().context_scores(ctx)
        length = ctx.keys.shape[2]
        heads = ctx.keys.shape[1]
        window = min(self.window, ctx.query.shape[2])
        slots = torch.arange(length, device=ctx.keys.device)
        valid = torch.ones(1, 1, length, dtype=torch.bool, device=slots.device) if ctx.valid is None else ctx.valid
        visible = (valid[:, :, None] & ctx.state[_REAL].to(slots.device)[:, None, :, None]).expand(
            -1, valid.shape[1], -1, -1
        )
        query = drafted
        if self.local:
            causal = valid[:, :, None] & valid[:, :, -window:, None] & (slots <= slots[-window:, None])
            visible = torch.cat([causal.expand(len(visible), -1, -1, -1), visible], 2)
            query = torch.cat([ctx.query[:, :, -window:], drafted.to(ctx.query.dtype)], 2)
        mass = query_mass(ctx.asks(query), ctx.keys, visible, entries=length - window, log_weight=ctx.log_weight)
        return group_mean(pool(mass, self.width(ctx), self.pooling, ctx.valid), heads)


@register_method(
    "lookahead", title="Lookahead Q-Cache", paper="arXiv 2505.20334", phase="end of prompt", derive=defaults.pooling
)
@dataclass(frozen=True, kw_only=True)
class LookaheadParameters(Parameters):
    """Keep the entries that a draft of the answer attends to."""

    budget: Budget | str | int | float = "20%"
    lookahead: int = 8
    draft: Budget | str | int | float | None = None
    local: bool = True
    window: int = 32
    kernel: Kernel = 7
    pooling: Pool = "avg"

    def plan(self) -> Plan:
        return Plan(evict=self.role(Lookahead))
