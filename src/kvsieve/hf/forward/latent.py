"""Queries of a layer with latent attention, of which only latents are stored."""

from __future__ import annotations

from torch import Tensor, nn

from kvsieve.attention import LatentQueries
from kvsieve.hf.cache.latent import LatentLayer
from kvsieve.hf.model.latent import up_projection
from kvsieve.types import AttentionQueries


def ask_latents(
    asked: AttentionQueries,
    layer: LatentLayer,
    module: nn.Module,
    key: Tensor,
    value: Tensor,
    who: str,
    *,
    prompt: bool,
) -> tuple[LatentQueries, Tensor, Tensor]:
    """Take what a layer's cache has staged, and find how the layer expands it.

    Args:
        asked: the queries.
        layer: the layer in the cache.
        module: its attention module.
        key: [B, Hq, L, D], what the module has made of what is staged.
        value: [B, Hq, L, Dv], as well.
        who: the layer, for errors.
        prompt: the pass is over tokens of a prompt.

    Returns:
        The queries, and what is to be stored: entries [B, 1, L, R + Dr] and their latents [B, 1, L, R].
    """
    entries, latents = layer.take_entries(who)
    if layer.up is None or (prompt and key.shape[2] > 1):
        # Anew with every prompt: weights may have changed since, as adapters do it.
        rotated = entries[..., latents.shape[-1] :]
        layer.up = up_projection(module, latents, rotated, key, value, who)
    given = LatentQueries(**vars(asked), up=layer.up, keys=key, values=value)
    return given, entries, latents
