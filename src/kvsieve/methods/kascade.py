"""Kascade: A Practical Sparse Attention Method for Long-Context LLM Inference (arXiv 2512.16391).

Anchor layers choose exactly: softmax weights of all stored entries, summed over the query heads of a KV head; each KV
head keeps its k entries with the largest sums, k = max(128, 10% of the length), and attends to these. Layers between
two anchors attend to what the anchor before them has chosen; each KV head takes the set of the anchor's KV head that
suits it best. Layer 0 is an anchor that attends to everything. Anchors and heads come from a profile
(`kvsieve calibrate --parts anchors`): a dynamic program maximizes the similarity of each layer with its anchor.

Without a profile, every sixth layer is an anchor (the paper has 5 of 32), and heads keep their numbers.

Differences from the reference: prompts attend densely (`sparse_questions` for questions); k follows the budget at the
end of the prompt and stays the same during an answer; the current entry is always read, unless ``paper=True``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
from kvsieve.errors import PlanError
from kvsieve.methods.arrays import set_numbers
from kvsieve.methods.exact_topk import ExactTopK
from kvsieve.methods.readers import Setting
from kvsieve.planning.profiles import Heads
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Layers, Traits
from kvsieve.types import AttentionQueries


@register_method(
    "kascade", title="Kascade", paper="arXiv 2512.16391", phase="decode", budget="10%", derive=lambda model, digits: {}
)
@dataclass(frozen=True, kw_only=True)
class Kascade(ExactTopK, static_shapes=True):
    """Choose the entries with the most attention in few anchor layers; layers between reuse them.

    share: the anchors, or layers per anchor.
    anchor_heads: [layers][KV heads], the anchor's KV head that chooses for each; none for the same ones.
    """

    newest: bool = True
    per_group: bool = True
    share: Layers = 6
    anchor_heads: Heads = field(default=(), repr=False)

    @property
    def traits(self) -> Traits:
        return replace(self.TRAITS, heads="all") if self.anchor_heads else self.TRAITS

    def __post_init__(self) -> None:
        super().__post_init__()
        set_numbers(self, "anchor_heads", "[layers][KV heads]")

    def check(self, num_layers: int) -> None:
        super().check(num_layers)
        if self.anchor_heads and len(self.anchor_heads) != num_layers:
            raise PlanError(
                f"Kascade has anchor_heads of {len(self.anchor_heads)} layers, the model has {num_layers}: calibrate "
                "this model, or leave anchor_heads= out"
            )

    def parameters(self, tokens: int, facts: ReadFacts) -> Setting:
        self.check(facts.num_layers)
        return Setting(tokens, tokens, dense=facts.layer_idx == 0)

    def heads_of_anchor(self, layer_idx: int, num_layers: int) -> tuple[int, ...] | None:
        if not self.anchor_heads or self.anchor(layer_idx, num_layers) == layer_idx:
            return None
        return tuple(int(head) for head in self.anchor_heads[layer_idx])

    def choose(self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: Setting) -> Choice:
        choice = super().choose(asked, kv_rows, state, setting)
        # A layer that attends to everything has these weights anyway.
        return Choice(choice.entries) if setting.dense else choice
