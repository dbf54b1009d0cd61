"""Queries of a layer with latent attention, of which only latents are stored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from kvsieve.attention import UpProjection, dense_attention, latent_attention
from kvsieve.cache import LayerStore
from kvsieve.hf.cache.latent import LatentLayer
from kvsieve.hf.forward.request import Asked
from kvsieve.hf.model.latent import up_projection


@dataclass(frozen=True, kw_only=True)
class AskedLatents(Asked):
    """Queries that a layer with latent attention brings.

    Attributes:
        up: the layer's up-projection.
        keys: [B, Hq, L, D], what the model has made of this pass's latents.
        values: [B, Hq, L, Dv], as well.
    """

    up: UpProjection
    keys: Tensor
    values: Tensor

    @cached_property
    def stored(self) -> Asked:
        return Asked(self.up.queries(self.query), self.scale, self.terms)

    def attend(self, store: LayerStore) -> Tensor:
        scale, valid, terms = self.scale, store.valid, self.terms
        if store.size == self.keys.shape[2]:
            # Nothing was stored before: the model has expanded all there is.
            return dense_attention(self.query, self.keys, self.values, scale=scale, valid=valid, terms=terms)
        return latent_attention(self.query, store.keys, self.up, scale=scale, valid=valid, terms=terms)

    def output(self, mixed: Tensor) -> Tensor:
        return self.up.outputs(mixed)


def ask_latents(
    asked: Asked, layer: LatentLayer, module: nn.Module, key: Tensor, value: Tensor, who: str
) -> tuple[AskedLatents, Tensor, Tensor]:
    """Take what a layer's cache has staged, and find how the layer expands it.

    Args:
        asked: the queries.
        layer: the layer in the cache.
        module: its attention module.
        key: [B, Hq, L, D], what the module has made of what is staged.
        value: [B, Hq, L, Dv], as well.
        who: the layer, for errors.

    Returns:
        The queries, and what is to be stored: entries [B, 1, L, R + Dr] and their latents [B, 1, L, R].
    """
    entries, latents = layer.take_entries(who)
    if layer.up is None or key.shape[2] > 1:
        # Anew with every prompt: weights may have changed since, as adapters do it.
        rotated = entries[..., latents.shape[-1] :]
        layer.up = up_projection(module, latents, rotated, key, value, who)
    given = AskedLatents(asked.query, asked.scale, asked.terms, up=layer.up, keys=key, values=value)
    return given, entries, latents
