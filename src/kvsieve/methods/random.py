"""Random Attention: the baseline of eviction in long answers (arXiv 2609.03430).

The prompt and the most recent entries stay; of the other generated entries each KV head keeps a uniform random sample.
Every eviction draws anew among the entries that are left, so that old ones become rare. The paper's setting, with K
entries and r recent ones: ``random(budget=K + r, answer="remaining", recent=r, every=r)``. Without `answer` it draws
among the prompt's entries, too: the baseline for prompts.

Numbers are drawn by hashing the seed, layer, head, the token's position and the row's length at the time. A row of a
padded batch keeps what it keeps alone, in chunks as in one pass.

Differences from the reference (randkv 0.1.0): a prompt above the budget is sampled at its end instead of refused; other
random numbers, without the request's identity.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.draws import drawn
from kvsieve.lazy import Tensor
from kvsieve.methods.base import ScoredEvictor, check_int, last_real, positions
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@register_method(
    "random", title="Random Attention", paper="arXiv 2609.03430", phase="end of prompt, decode", budget="20%"
)
@dataclass(frozen=True, kw_only=True)
class Random(ScoredEvictor, heads="own", query_aware=False):
    """Keep recent entries and a random sample of the others, drawn per head: the baseline for long answers.

    recent: newest entries, always kept, at least 0. seed: of the draws; the same one keeps the same entries.
    """

    stays = ("recent",)

    every: int | None = 64
    recent: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_int(self, "recent", self.recent, 0)
        check_int(self, "seed", self.seed, 0)
        super().__post_init__()

    def scores(self, ctx: LayerContext) -> Tensor:
        return drawn(ctx, positions(ctx), self.seed).masked_fill(last_real(ctx, self.recent), float("inf"))
