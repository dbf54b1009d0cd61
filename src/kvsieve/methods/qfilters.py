"""Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression (arXiv 2503.02812).

Queries of a head mostly point in one direction: the principal right-singular vector of queries sampled once per model,
with the sign of a positive mean query. It is the head's filter; the filters of a group's query heads are averaged. An
entry's score is its key's projection on the filter of its KV head, without queries or attention weights of the prompt.
The filters come from a profile (`kvsieve calibrate --parts q_filters`), made of queries after rotary embedding, like
the stored keys.

Differences from the reference: the averaged filters are normalised; `recent` may protect the newest entries; filters
were published with the opposite sign and scores as -(f . k).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kvsieve.core.scoring import score_dtype
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.arrays import set_numbers
from kvsieve.methods.base import ScoredEvictor, check_int, last_real
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Filters, Profile, array_of
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@dataclass(frozen=True, kw_only=True)
class QFilters(ScoredEvictor, heads="own", query_aware=False):
    """Keep the entries with the largest projections of keys on their head's filter.

    filters: [layers][KV heads][D], as numbers in tuples or lists. recent: newest entries that always stay, none by
    default as in the paper; a question at the end of a prompt needs them.
    """

    stays = ("recent",)

    filters: Filters = field(repr=False)
    recent: int = 0

    def __post_init__(self) -> None:
        set_numbers(self, "filters", "[layers][KV heads][D]")
        check_int(self, "recent", self.recent, 0)
        super().__post_init__()

    def check_layer(self, index: int, num_layers: int, heads: int, query_heads: int, dim: int) -> None:
        layer = self.filters[index] if len(self.filters) == num_layers else ()
        if [len(vector) for vector in layer] != [dim] * heads:
            raise PlanError(
                f"QFilters: the filters are of {len(self.filters)} layers and do not fit layer {index} of "
                f"{num_layers} with {heads} KV heads of {dim}; make those of this model with `kvsieve calibrate`"
            )

    def scores(self, ctx: LayerContext) -> Tensor:
        heads = ctx.keys.shape[1] * ctx.ranks.size
        self.check_layer(ctx.layer_idx, ctx.num_layers, heads, 0, ctx.keys.shape[3])
        own = self.filters[ctx.layer_idx][ctx.ranks.own(heads)]
        keys = ctx.keys.to(score_dtype(ctx.keys.dtype))
        filters = torch.tensor(own, dtype=keys.dtype).to(keys.device, non_blocking=True)
        scores = (keys @ filters[:, :, None]).squeeze(-1)
        return scores.masked_fill(last_real(ctx, self.recent), float("inf")) if self.recent else scores


@register_method("qfilters", title="Q-Filters", paper="arXiv 2503.02812", phase="end of prompt", part="q_filters")
def qfilters(
    budget: Budget | str | int | float = "20%",
    profile: Profile | str | os.PathLike[str] | None = None,
    recent: int = 0,
) -> Plan:
    """Keep keys along the mean direction of their head's queries; needs a model's profile, no queries."""
    filters, model = array_of("q_filters", "qfilters", profile)
    return Plan(evict=QFilters(budget=Budget.parse(budget), filters=filters, recent=recent), profile=model)
