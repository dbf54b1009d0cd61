"""Sparse prompts: which blocks of keys each block of a prompt's queries attends to."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from kvsieve.roles.base import Role

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.core.blocks import PromptContext


class SparsePrefill(Role):
    """Chooses, while a prompt is read, the blocks of keys that each block of queries attends to.

    Nothing is dropped: keys and values of all tokens are stored, and what evicts, propagates or reads sees them all.
    Tokens after the prompt attend to everything that is stored, or to what a Reader chooses.
    """

    @property
    def queries(self) -> int:
        """Queries of a block, a multiple of `block`."""
        return 128

    @property
    def block(self) -> int:
        """Keys of a block."""
        return 128

    @property
    def least(self) -> int:
        """Entries from which on a layer attends sparsely; with fewer it attends to all."""
        return 1024

    def acts_in(self, layer_idx: int, num_layers: int) -> bool:
        """Tell whether a layer attends sparsely at all."""
        return True

    def density(self, tokens: int) -> float | None:
        """Share of the causal blocks that are computed of a prompt, where that is known beforehand; else None."""
        return None

    @abstractmethod
    def select(self, ctx: PromptContext) -> Tensor:
        """Choose blocks of keys.

        Blocks that are not visible may be chosen, and are left out; those of the diagonal are always computed.

        Args:
            ctx: queries and keys of a layer.

        Returns:
            bool [B, H or Hq, query blocks, key blocks]: sets for each KV head, or for each query head.
        """
