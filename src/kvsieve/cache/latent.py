"""Store of one layer with latent attention: a latent and a rotated part per token, shared by all heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvsieve.cache.store import DenseStore
from kvsieve.core.kv_rows import SlotRows
from kvsieve.errors import UnsupportedModelError
from kvsieve.types import Selection


class LatentStore(DenseStore):
    """Entries with values that are part of their keys, and are not stored separately.

    Attributes:
        rank: R, channels of a latent; 0 before anything is stored.
        keys: [B, 1, size, R + Dr], a latent and the rotated part.
        values: [B, 1, size, R], the latents, a view of `keys`.
    """

    rank = 0

    @property
    def values(self) -> Tensor:
        return self.keys[..., : self.rank]

    def slot_rows(self) -> tuple[SlotRows, SlotRows]:
        keys = self.buffers()[0].flatten(0, -2)
        return keys, keys[:, : self.rank]

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        token_index: Tensor,
        valid: Tensor | None = None,
        counts: tuple[int, ...] | None = None,
        reserve: int = 0,
    ) -> None:
        """Append new entries; `values` [B, 1, L, R] are the first channels of `keys`."""
        self.rank = values.shape[-1]
        super().append(keys, values[..., :0], token_index, valid, counts, reserve)

    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        super().put(keys, values[..., :0], slots)

    def keep(self, selection: Selection, reserve: int = 0, *, reuse: bool = True) -> None:
        if selection.indices.shape[1] > 1:
            raise UnsupportedModelError(
                f"the plan keeps entries for each of {selection.indices.shape[1]} query heads, and a layer with latent "
                "attention has one set of entries for all heads; leave per_query_head out"
            )
        super().keep(selection, reserve, reuse=reuse)

    def parts(self) -> dict[str, Any]:
        parts = super().parts()
        parts.pop("values", None)
        return {**parts, "rank": self.rank}
