"""Queries of a layer with latent attention, with only latents stored."""

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
    """Take the layer's staged entries, and return queries that know how the layer expands them.

    Args:
        asked: the queries.
        layer: the layer in the cache.
        module: its attention module.
        key: [B, Hq, L, D], the staged entries expanded by the module.
        value: [B, Hq, L, Dv], likewise.
        who: the layer, for errors.
        prompt: the pass is over tokens of a prompt.

    Returns:
        The queries, and the entries to store: [B, 1, L, R + Dr] and their latents [B, 1, L, R].
    """
    entries, latents = layer.take_entries(who)
    if layer.up is None or (prompt and key.shape[2] > 1):
        # Again with every prompt: weights may have changed, for example by adapters.
        rotated = entries[..., latents.shape[-1] :]
        layer.up = up_projection(module, latents, rotated, key, value, who)
    return LatentQueries(**vars(asked), up=layer.up, keys=key, values=value), entries, latents
