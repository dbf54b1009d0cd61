"""OmniKV: Dynamic Context Selection for Efficient Long-Context LLMs (ICLR 2025, openreview ulCAPXYXfa).

A few filter layers attend to everything. From their softmax weights, the largest over all query heads of the layer, the
k tokens with the most attention are chosen, the same for all heads. Layers up to the next filter attend to these. The
layers before the first filter, and the layer after each filter, attend to everything. Nothing is dropped. As published
for a model of 32 layers: filters 2, 8 and 18, and k = 6.7% of the prompt; other models get filters at the same shares
of their depth.

Differences from the reference: entries after the prompt compete with the prompt's, where the reference reads them in
any case (the current one is always read); k counts them; entries are not moved to another device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
from kvsieve.core.page_weights import best_entries, page_softmax
from kvsieve.core.scoring import score_dtype
from kvsieve.errors import PlanError
from kvsieve.methods.base import check_int, skipped
from kvsieve.methods.readers import BudgetReader, Setting
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Layers
from kvsieve.types import AttentionQueries

# Filters of the published configuration, and the layers of its model.
FILTERS, LAYERS = (2, 8, 18), 32


@register_method(
    "omnikv",
    title="OmniKV",
    paper="openreview ulCAPXYXfa",
    phase="decode",
    budget="6.7%",
    derive=lambda model, digits: {"share": "/".join(str(filter_at(layer, model.layers)) for layer in FILTERS)},
)
@dataclass(frozen=True, kw_only=True)
class OmniKV(BudgetReader, heads="all", static_shapes=True):
    """Choose tokens in few filter layers, by the attention of any head; all heads of later layers read them.

    share: the filters, or layers per filter.
    wait: layers after each filter that attend to everything.
    """

    share: Layers = FILTERS
    wait: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "wait", self.wait, 0)
        if not self.shares:
            raise PlanError("OmniKV: share=1 makes every layer a filter that attends to everything; raise share=")

    @property
    def shares_heads(self) -> bool:
        return True

    def setting(self, facts: ReadFacts) -> Setting | None:
        layer = facts.layer_idx
        anchor = self.anchor(layer, facts.num_layers)
        before = isinstance(self.share, tuple) and layer < min(self.share)
        waits = anchor < layer <= anchor + self.wait
        if before or waits or skipped(self.skip_layers, layer, facts.num_layers):
            return None
        tokens = self.budget.entries(facts.length + facts.new_tokens, 16)
        return Setting(tokens, tokens, dense=layer == anchor)

    def choose(self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: Setting) -> Choice:
        keys = kv_rows.keys_at(kv_rows.span(0, kv_rows.size))
        dtype = score_dtype(asked.query.dtype)
        logits = asked.query.to(dtype) @ keys.to(dtype).transpose(1, 2) * asked.scale
        weights = page_softmax(logits, kv_rows.size, 1, kv_rows.length, asked)
        of_tokens = weights.amax(1).unflatten(0, (-1, kv_rows.heads)).amax(1)
        count = min(setting.count, kv_rows.size)
        best = best_entries(of_tokens, kv_rows.size, 1, count, self.newest, kv_rows.length)
        # A filter attends to everything, and has these weights anyway.
        metadata_bytes = 0 if setting.dense else keys.nbytes
        return Choice(best.repeat_interleave(kv_rows.heads, 0), metadata_bytes=metadata_bytes)


def filter_at(layer: int, layers: int) -> int:
    """Return the filter of a model of `layers` layers at the same depth as a published one, at least 1."""
    return min(max(round(layer * layers / LAYERS), 1), layers - 1)
