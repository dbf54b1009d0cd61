"""Sparse prefill: choice of key blocks for each block of queries."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from kvsieve.planning.roles.base import Role

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.core.blocks import PromptContext


class SparsePrefill(Role):
    """Chooses, during prefill, the blocks of keys that each block of queries attends to.

    Nothing is dropped: keys and values of all tokens are stored and available to the other roles. Tokens after the
    prompt attend to everything stored, or to a Reader's choice.
    """

    @property
    def queries(self) -> int:
        """Queries of a block, a multiple of `block`. A pass over fewer tokens, such as a short chunk, is dense."""
        return 128

    @property
    def block(self) -> int:
        """Keys of a block."""
        return 128

    @property
    def least(self) -> int:
        """Fewest entries for sparse attention in a layer; a pass that ends with fewer is dense."""
        return 1024

    @property
    def shared(self) -> int:
        """Query blocks in a row that attend to the same blocks of keys, and to all of their own."""
        return 1

    def acts_in(self, layer_idx: int, num_layers: int) -> bool:
        """Return True if a layer may attend sparsely."""
        return True

    def density(self, tokens: int) -> float | None:
        """Return the share of the causal blocks computed for a prompt, or None if unknown beforehand."""
        return None

    @abstractmethod
    def select(self, ctx: PromptContext) -> Tensor:
        """Choose blocks of keys.

        Invisible blocks are ignored; those of the diagonal are always computed.

        Args:
            ctx: queries and keys of a layer.

        Returns:
            bool [B, H or Hq, query blocks, key blocks]: sets for each KV head, or for each query head.
        """
