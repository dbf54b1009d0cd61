"""Weights in their various forms: low-bit, with adapters, or loaded for each call."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.errors import KvsieveError
from kvsieve.models.quantized import DequantizedWeight

# Unit vectors per call of a projection.
_ROWS = 1024
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def plain_weight(linear: Any) -> Tensor | None:
    """Return the weight [C, D] of a linear layer if it is a plain tensor of floats in memory, else None.

    Under tensor parallelism a process has the columns of its own heads.
    """
    weight = getattr(linear, "weight", None)
    if not isinstance(linear, nn.Linear) or not isinstance(weight, Tensor):
        return None
    if hasattr(weight, "to_local"):
        weight = weight.to_local()
    # Floats of 8 bits come with scales.
    plain = type(weight) in (Tensor, nn.Parameter, DequantizedWeight) and weight.dtype in _FLOATS and weight.ndim == 2
    return weight.detach() if plain and not weight.is_meta else None


def is_linear(linear: Any, width: int) -> bool:
    """Return True if a module is a linear layer with so many inputs, in any weight format."""
    return isinstance(linear, nn.Module) and getattr(linear, "in_features", None) == width


@torch.no_grad()
def weight_by_images(linear: nn.Module, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the weight [C, D] of a linear layer, in `dtype`, from the layer's outputs for unit vectors.

    So the library that packed the weight unpacks it, active adapters are added, and an offloaded weight is loaded. Half
    the difference to the opposite vector excludes the bias.
    """
    parts = []
    for first in range(0, width, _ROWS):
        unit = torch.zeros(min(_ROWS, width - first), width, device=device, dtype=dtype)
        unit.diagonal(first).fill_(1)
        parts.append((linear(unit) - linear(-unit)) / 2)
    return torch.cat(parts).T.to(dtype)


def adapted_layer(decoder: nn.Module) -> Any | None:
    """Return a PEFT layer with adapters, representative of all layers, or None."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return None
    return next((module for module in decoder.modules() if isinstance(module, peft.BaseTunerLayer)), None)


def active_adapters(layer: Any | None) -> tuple[str, ...]:
    """Return the names of active adapters: merged into the weights, or enabled."""
    if layer is None:
        return ()
    return tuple(sorted({*layer.merged_adapters, *(() if layer.disable_adapters else layer.active_adapters)}))


def forms_of(decoder: nn.Module) -> dict[str, tuple[torch.dtype, str]]:
    """Return dtype and device of each weight of a decoder, by name."""
    return {name: (weight.dtype, str(weight.device)) for name, weight in decoder.named_parameters()}


def check_forms(decoder: nn.Module, known: dict[str, tuple[torch.dtype, str]]) -> None:
    """Raise KvsieveError if weights were cast or moved since `known` was recorded."""
    found = forms_of(decoder)
    for name, before in known.items():
        now = found.get(name, before)
        # Weights loaded for each call are not in memory in between.
        if now != before and "meta" not in (now[1], before[1]):
            raise KvsieveError(
                f"the weight {name} is {now[0]} on {now[1]} and was {before[0]} on {before[1]} when the plan was "
                "attached: leave the `with` block before the model is cast or moved, then attach again, with new caches"
            )


def why_out_of_reach(model: Any) -> str | None:
    """Return a clause why a loaded model has no device for a prompt, or None."""
    if getattr(model, "hf_device_map", None) and model.device.type == "meta":
        return (
            "all its weights are on disk, its embeddings too, so no device takes a prompt; keep these in memory, as "
            "device_map='auto' does, or device_map={'model.embed_tokens': 'cpu', ...}"
        )
    return None
