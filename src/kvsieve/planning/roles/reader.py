"""Readers: choice of the stored entries that a new token attends to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from kvsieve.planning.roles.base import Role

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
    from kvsieve.core.page_recipe import PageRecipe
    from kvsieve.types import AttentionQueries, LayerContext


class Reader(Role):
    """Chooses the stored entries that a new token attends to.

    It sees KV rows (core.kv_rows): the real entries of one KV head of one batch row, in any storage. Prompts attend
    densely; with `sparse_questions`, a prompt that the plan does not reduce attends as answers do.
    """

    @property
    def sparse_questions(self) -> bool:
        """True if a prompt that the plan does not reduce attends sparsely, too."""
        return False

    @property
    def shares(self) -> bool:
        """True if layers read what a layer before them has chosen."""
        return False

    @property
    def shares_heads(self) -> bool:
        """True if all KV heads read the same tokens; it takes no evictor, which keeps others in each head."""
        return False

    @property
    def observes(self) -> bool:
        """True if it chooses by scores of entries, which every pass adds to: call `observe`. It takes no codec."""
        return False

    def observe(self, ctx: LayerContext) -> tuple[Tensor, int]:
        """Return the parts of a pass in the scores of the last n stored entries; called if `observes` is set.

        Called in every pass of prompts and answers, per layer, after its attention; several tokens of an answer have a
        call each. ``ctx.query`` has all queries of the pass. The sum over the passes must not depend on their ends.
        `choose` finds the sums by `KVRows.scores_at`.

        Returns:
            Sums to add, [B, Hq, n], and the number of stored entries before these. New entries begin with 0.
        """
        raise NotImplementedError

    def anchor(self, layer_idx: int, num_layers: int) -> int:
        """Return the layer whose choice a layer reads: itself for a layer that chooses.

        If that layer does not read sparsely, the first one after it that does chooses.
        """
        return layer_idx

    def heads_of_anchor(self, layer_idx: int, num_layers: int) -> tuple[int, ...] | None:
        """Return, for each KV head of a layer, the anchor's KV head that chooses for it; None for the same ones."""
        return None

    def attends_to_all(self, setting: Any) -> bool:
        """Return True for a layer that chooses for the layers after it, and attends to everything itself."""
        return False

    @abstractmethod
    def setting(self, facts: ReadFacts) -> Hashable | None:
        """Return the parameters for one row's KV rows in one layer, or None to read everything.

        Raises:
            PlanError: the budget cannot be honoured there.
        """

    @abstractmethod
    def reads_all(self, setting: Any, size: int) -> bool:
        """Return True if KV rows of `size` entries are read completely."""

    @abstractmethod
    def choose(self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: Any) -> Choice:
        """Choose the entries of each KV row that a query attends to.

        Args:
            asked: queries [X, G, D], the G query heads of each KV row, with the terms of their weights.
            kv_rows: the KV rows.
            state: cached data of these KV rows that only grow between calls: tensors with a row per KV row, or objects
                with a method all_tensors() that returns their tensors.
            setting: the result of `setting`.
        """

    def recipe(self, setting: Any) -> PageRecipe | None:
        """Return the choice of `choose` as data for compiled code, or None if that is impossible.

        Both must choose the same entries, up to ties.
        """
        return None

    def granularity(self, setting: Any) -> int:
        """Return the entries per unit of its choice, such as a page."""
        return 1
