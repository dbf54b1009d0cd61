"""InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory (arXiv 2402.04617).

A token attends to the first tokens, a local window of the l_L tokens before it, and some blocks of l_bs tokens between.
A token's representative score is the mean of its products with the l_L queries after it, r_m = 1/l_L sum_j q_{m+j} k_m.
The r_k tokens with the highest scores represent a block that has left the local window. The blocks with the largest
sums of products between the query and their representatives are attended to.

As in the public code, every query head has its own representatives, all heads of a layer attend to the same blocks, by
the sum over heads, and tokens that have left the window and do not fill a block yet are attended to.

The budget t is the number of entries read per KV head and step: the first ones (at most t/8), the window (by default
2/3 of the rest, as published: 4096 of 6144; of a share 2/3 of its floor) and blocks, at most 1/8 of the others each.

Differences from the reference: prompts attend densely, within the model's own context, and keys keep their positions
(the reference gives all tokens beyond the window the same distance); scores are the paper's mean of products, where the
code sums softmax weights; the last block needed is read in part, so that t entries are read; nothing is offloaded. A
layer without entries of its own chooses by the scores of the layer that stores them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
from kvsieve.core.later_logits import later_logits
from kvsieve.core.representatives import BlockRepresentatives
from kvsieve.core.scoring import score_dtype
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int, positions
from kvsieve.methods.readers import LEAST, BudgetReader, Setting
from kvsieve.planning.registry import register_method
from kvsieve.types import AttentionQueries, LayerContext


@dataclass(frozen=True)
class BlockSetting(Setting):
    """A setting with the number of first entries, `sinks`. page: entries of a block."""

    sinks: int = 0


@register_method("infllm", title="InfLLM", paper="arXiv 2402.04617", phase="decode", budget=1024)
@dataclass(frozen=True, kw_only=True)
class InfLLM(BudgetReader, heads="all"):
    """Read blocks by the keys in them that later queries attended to most; evict nothing.

    sinks: first entries that are always read. local: tokens before the current one that are always read, and queries
    after a token that score it; None for 2/3 of the budget without `sinks`. block: entries per block. representatives:
    per block and query head.
    """

    sinks: int = 128
    local: int | None = None
    block: int = 128
    representatives: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "sinks", self.sinks, 0)
        for name in ("block", "representatives"):
            check_int(self, name, vars(self)[name], 1)
        if self.local is not None:
            check_int(self, "local", self.local, 1)
        if self.budget.tokens is not None:
            self._in_blocks(self.budget.tokens)
        if self.sparse_questions:
            raise PlanError("InfLLM: sparse_questions is not supported: tokens of a question are scored together")
        if not self.newest:
            raise PlanError("InfLLM: the window is always read, so newest=False would do nothing; leave it out")

    @property
    def shares_heads(self) -> bool:
        return True

    @property
    def observes(self) -> bool:
        return True

    @property
    def window(self) -> int:
        """Queries after a token that score it."""
        if self.local is not None:
            return self.local
        # Prompts are scored before a share of them is known: it is at least this.
        tokens = self.budget.tokens or max(self.budget.floor, LEAST)
        return 2 * (tokens - self._sinks(tokens)) // 3

    def _sinks(self, tokens: int) -> int:
        return min(self.sinks, tokens // 8)

    def observe(self, ctx: LayerContext) -> tuple[Tensor, int]:
        real = None if ctx.valid is None else ctx.valid[:, 0]
        return later_logits(ctx.query, ctx.keys, positions(ctx)[:, 0], real, self.window)

    def _in_blocks(self, tokens: int) -> int:
        """Return the entries of a budget that are read in blocks. Raises PlanError if none are."""
        sinks = self._sinks(tokens)
        # The current token is read beside the window.
        chosen = tokens - sinks - self.window - 1
        if chosen < 1:
            raise PlanError(
                f"InfLLM: a window of {self.window} tokens leaves no blocks to a budget of {tokens} with {sinks} first "
                "tokens; lower local= or raise budget="
            )
        return chosen

    def parameters(self, tokens: int, facts: ReadFacts) -> BlockSetting:
        page = min(self.block, -(-self._in_blocks(tokens) // 8))
        return BlockSetting(tokens, tokens, page, sinks=self._sinks(tokens))

    def choose(self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: BlockSetting) -> Choice:
        if "blocks" not in state:
            state["blocks"] = BlockRepresentatives(setting.sinks, setting.page, self.representatives, self.window)
        table: BlockRepresentatives = state["blocks"]
        table.update(kv_rows)
        query = asked.query.to(score_dtype(asked.query.dtype))
        keys = table.keys.to(query.dtype)
        scores = torch.einsum("xgd,xgcd->xc", query, keys).unflatten(0, (-1, kv_rows.heads)).sum(1)
        best = scores.sort(dim=-1, descending=True, stable=True).indices
        count = setting.count - setting.sinks - (kv_rows.size - table.size)
        inside = torch.arange(setting.page, device=best.device)
        found = (setting.sinks + best[..., None] * setting.page + inside).flatten(1)[:, :count]
        found = found.repeat_interleave(kv_rows.heads, 0)
        ends = [kv_rows.span(0, setting.sinks), kv_rows.span(table.size, kv_rows.size)]
        return Choice(torch.cat([*ends, found], 1), metadata_bytes=keys.numel() * keys.element_size())
