"""CompactAttention (arXiv 2605.16839): one table of key blocks for a chunk of queries and a group of heads.

The choice of another sparse prefill method, `base`, is a signal of which entries a chunk needs: the blocks chosen by
any query block of the chunk, for any query head of a group, are all attended to by all of the chunk's queries. These
blocks form one table per KV head, over which attention is dense; the chunk's own blocks are always in it.

Differences from the reference: a chunk is `chunk_length` queries, however many tokens a pass has; query blocks for
which `base` computes everything (``full``) do, and do not add to the tables of others.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.blocks import PromptContext
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.methods.base import check_int, plan_of_base
from kvsieve.methods.block_prefill import BlockPrefill
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import SparsePrefill


@dataclass(frozen=True, kw_only=True)
class CompactAttention(SparsePrefill, heads="own"):
    """Attend to all blocks that `base` chooses for any query block of a chunk and any head of a group.

    base: a sparse prefill method that chooses blocks by their content.
    chunk_length: queries that share a table, a multiple of the base's `queries`.
    """

    base: BlockPrefill
    chunk_length: int = 2048

    def __post_init__(self) -> None:
        if not isinstance(self.base, BlockPrefill):
            raise PlanError(
                f"CompactAttention: base must be a sparse prefill method such as FlashPrefill(), got {self.base!r}"
            )
        check_int(self, "chunk_length", self.chunk_length, self.base.queries)
        if self.chunk_length % self.base.queries:
            raise PlanError(
                f"CompactAttention: chunk_length must be a multiple of the {self.base.queries} queries of a block, got "
                f"{self.chunk_length}"
            )

    @property
    def queries(self) -> int:
        return self.base.queries

    @property
    def block(self) -> int:
        return self.base.block

    @property
    def least(self) -> int:
        return self.base.least

    @property
    def shared(self) -> int:
        return self.chunk_length // self.base.queries

    def check(self, num_layers: int) -> None:
        self.base.check(num_layers)

    def acts_in(self, layer_idx: int, num_layers: int) -> bool:
        return self.base.acts_in(layer_idx, num_layers)

    def select(self, ctx: PromptContext) -> Tensor:
        grid = ctx.grid
        chosen = self.base.select(ctx) & grid.visible(ctx.keys.device)
        heads = ctx.keys.shape[1]
        groups = chosen.unflatten(1, (heads, -1)).any(2)
        full = torch.zeros(grid.query_blocks, dtype=torch.bool, device=chosen.device)
        if ctx.ends and self.base.full:
            full[-self.base.full :] = True
        together = self.chunk_length // self.base.queries
        rest = -grid.query_blocks % together
        rows = F.pad(groups & ~full[:, None], (0, 0, 0, rest)).unflatten(2, (-1, together))
        table = rows.any(3, keepdim=True).expand_as(rows).flatten(2, 3)[:, :, : grid.query_blocks]
        first = torch.arange(grid.query_blocks, device=chosen.device) // together * together * grid.own + grid.first
        own = torch.arange(grid.key_blocks, device=chosen.device) >= first[:, None]
        return table | own | (groups & full[:, None])


@register_method("compactattention", title="CompactAttention", paper="arXiv 2605.16839", phase="prefill")
def compact_attention(
    base: str = "flashprefill",
    chunk_length: int = 2048,
    block: int = 128,
    queries: int = 128,
    least: int = 1024,
    local: int = 1,
    full: int = 1,
    skip_layers: int | tuple[int, ...] | str = 0,
) -> Plan:
    """Prefill attends to one table of blocks per chunk and KV head, the union of another method's choices."""
    names = {"block": block, "queries": queries, "least": least, "local": local, "full": full}
    plan = plan_of_base("compactattention", base, **names, skip_layers=skip_layers)
    if not isinstance(plan.prefill, BlockPrefill) or plan.roles != ("prefill",):
        raise PlanError(
            f"compactattention: base must name a sparse prefill method such as flashprefill or xattention, got {base!r}"
        )
    return Plan(prefill=CompactAttention(base=plan.prefill, chunk_length=chunk_length))
