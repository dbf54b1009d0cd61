"""One layer with latent attention: stores a latent per token."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.attention import UpProjection
from kvsieve.cache import LatentStore
from kvsieve.hf.cache.layer import SieveLayer


class LatentLayer(SieveLayer):
    """Latents of one layer, except those that the plan drops.

    The model gives the cache a latent and the rotated part of the key for each token, and expands the result of
    `update`: the new tokens only, which are returned unchanged.

    Attributes:
        up: the layer's up-projection, found in its first pass; its tensors are the model's weights.
    """

    is_latent = True

    def __init__(self) -> None:
        super().__init__()
        self.store = LatentStore()
        self.up: UpProjection | None = None

    def take_entries(self, who: str) -> tuple[Tensor, Tensor]:
        """Return the staged entries [B, 1, L, R + Dr], and their latents [B, 1, L, R], a view."""
        latents, rotated = self.take_staged(who)
        entries = torch.cat([latents, rotated], -1)
        return entries, entries[..., : latents.shape[-1]]
