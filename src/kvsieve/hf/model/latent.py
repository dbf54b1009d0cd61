"""The up-projection of a layer with latent attention, found among its modules by trial."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvsieve.attention import UpProjection
from kvsieve.errors import UnsupportedModelError
from kvsieve.models.quantized import DequantizedWeight

_KINDS = (Tensor, nn.Parameter, DequantizedWeight)


def candidates(attention: nn.Module, rank: int) -> list[nn.Linear]:
    """Linear layers that could expand latents of `rank` channels, with weights that can be computed with here."""
    return [
        module
        for module in attention.modules()
        if isinstance(module, nn.Linear)
        and module.in_features == rank
        and "bias" not in dict(module.named_parameters(recurse=False))
        and module.weight.is_floating_point()
        and type(_own(module.weight)) in _KINDS
    ]


def up_projection(
    attention: nn.Module, latents: Tensor, rotated: Tensor, key: Tensor, value: Tensor, who: str
) -> UpProjection:
    """Return the projection that makes a layer's keys and values from latents.

    Args:
        attention: the layer's attention module.
        latents: [B, 1, L, R], as passed to the cache.
        rotated: [B, 1, L, Dr], passed with them.
        key: [B, Hq, L, Dn + Dr], the layer's keys.
        value: [B, Hq, L, Dv], the layer's values.
        who: the layer, for the error.

    Raises:
        UnsupportedModelError: no weight of the module gives these keys and values.
    """
    heads = key.shape[1]
    width = value.shape[-1]
    plain = key.shape[-1] - rotated.shape[-1]
    entry = torch.cat([latents[:, :, -1:], rotated[:, :, -1:]], -1)
    for linear in candidates(attention, latents.shape[-1]):
        weight = _own(linear.weight).detach()
        fits = weight.shape[0] == heads * (plain + width) and weight.dtype == latents.dtype and plain > 0
        if not fits or weight.device != latents.device:
            continue
        per_head = weight.view(heads, plain + width, -1)
        for rotated_first in (False, True):
            up = UpProjection(per_head[:, :plain], per_head[:, plain:], rotated_first)
            if all(
                _alike(expanded, tensor[:, :, -1:])
                for expanded, tensor in zip(up.expand(entry), (key, value), strict=True)
            ):
                return up
    raise UnsupportedModelError(
        f"{who} caches latents and attends to keys and values made of them, and no linear layer of it is the "
        "up-projection that makes them (low-bit or offloaded weights, a bias or an adapter hide it); load the model "
        "with plain weights on one device, in the dtype it computes in"
    )


def _own(weight: Tensor) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _alike(expanded: Tensor, stored: Tensor) -> bool:
    """Return whether expanded entries [.., D] equal those of the model, up to rounding."""
    loose = max(8 * torch.finfo(stored.dtype).eps, 1e-5 if stored.dtype != torch.float64 else 1e-9)
    expected = stored.detach().float() if stored.dtype != torch.float64 else stored.detach()
    return bool((expanded.to(expected.dtype) - expected).norm() <= loose * expected.norm())
