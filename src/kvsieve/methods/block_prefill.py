"""Shared parameters of sparse prefill methods."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.blocks import PromptContext
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor
from kvsieve.methods.base import check_int, parse_layers, skipped
from kvsieve.planning.roles import Layers, SparsePrefill, check_layers


@dataclass(frozen=True, kw_only=True)
class BlockPrefill(SparsePrefill):
    """Base with parameters for blocks and for layers with full attention.

    block: keys per block. queries: queries per block, a multiple of `block`. least: entries from which a pass is
    sparse; a pass over fewer tokens than `queries`, such as a short chunk, never is. sinks: keys at the beginning that
    all queries attend to, in whole blocks. local: keys before their own block that all queries attend to, in whole
    blocks. full: last query blocks of a prompt, usually with its question, that attend to everything. skip_layers:
    layers with full attention: how many at the start, or which, as text "0/1/-1".
    """

    block: int = 128
    queries: int = 128
    least: int = 1024
    sinks: int = 1
    local: int = 1
    full: int = 1
    skip_layers: Layers = 0

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("queries", 1), ("least", 1), ("sinks", 0), ("local", 0), ("full", 0)):
            check_int(self, name, getattr(self, name), least)
        object.__setattr__(self, "skip_layers", parse_layers(self, self.skip_layers))
        if self.queries % self.block:
            raise PlanError(
                f"{type(self).__name__}: queries must be a multiple of block, got {self.queries} queries and "
                f"{self.block} keys of a block"
            )

    def check(self, num_layers: int) -> None:
        check_layers(self, "skip_layers", self.skip_layers, num_layers)

    def acts_in(self, layer_idx: int, num_layers: int) -> bool:
        return not skipped(self.skip_layers, layer_idx, num_layers)

    def always(self, ctx: PromptContext) -> Tensor:
        """Return the blocks that are computed regardless of scores, bool [query blocks, key blocks]."""
        grid = ctx.grid
        device = ctx.keys.device
        near = grid.near(-(-self.local // self.block), device)
        near[:, : -(-(self.sinks + grid.pad) // self.block) if self.sinks else 0] = True
        if ctx.ends and self.full:
            near[-self.full :] = True
        return near & grid.visible(device)


def check_share(role: SparsePrefill, name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise PlanError(f"{type(role).__name__}: {name} must be above 0 and at most 1, got {value:g}")
