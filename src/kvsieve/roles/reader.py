"""Readers: which stored entries a new token reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from kvsieve.roles.base import Role

if TYPE_CHECKING:
    from kvsieve.core.kv_rows import Choice, KVRows, ReadFacts
    from kvsieve.core.page_recipe import PageRecipe
    from kvsieve.types import AttentionQueries


class Reader(Role):
    """Chooses which stored entries a new token reads.

    It sees KV rows (core.kv_rows): the entries of one KV head of one batch row, all of them real, whatever they are
    stored in. Prompts are read densely; with `sparse_questions`, one that the plan leaves whole is read as answers
    are.
    """

    @property
    def sparse_questions(self) -> bool:
        """True where a prompt that the plan leaves whole is read sparsely, too."""
        return False

    @abstractmethod
    def setting(self, facts: ReadFacts) -> Hashable | None:
        """Return the parameters for one row's KV rows in one layer; None where everything is read.

        Raises:
            PlanError: the budget cannot be honoured there.
        """

    @abstractmethod
    def reads_all(self, setting: Any, size: int) -> bool:
        """Return True if KV rows of `size` entries are read completely."""

    @abstractmethod
    def choose(self, asked: AttentionQueries, kv_rows: KVRows, state: dict[str, Any], setting: Any) -> Choice:
        """Choose the entries of each KV row that a query reads.

        Args:
            asked: queries [X, G, D], the G query heads of each KV row, with all that weights are to be computed by.
            kv_rows: the KV rows.
            state: scratch of these KV rows: what is derived from their entries (tensors with a row per KV row, or
                objects with a method all_tensors() that gives their tensors), which between calls only grow.
            setting: what `setting` returned.
        """

    def recipe(self, setting: Any) -> PageRecipe | None:
        """Describe the choice of `choose` as data for compiled code, or return None if that is impossible.

        Both must choose the same entries, up to ties.
        """
        return None

    def granularity(self, setting: Any) -> int:
        """Entries per unit of its choice, such as those of a page."""
        return 1
