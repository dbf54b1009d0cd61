"""Weights in the forms in which people have them: low-bit, with adapters, brought in from elsewhere for each call."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from kvsieve.errors import KvsieveError

# Unit vectors that a projection is asked for at a time.
_ROWS = 1024
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def plain_weight(linear: Any) -> Tensor | None:
    """Return the weight [C, D] of a linear layer that holds it as a plain tensor of floats here; None for any other.

    Under tensor parallelism a process holds the columns of its own heads.
    """
    weight = getattr(linear, "weight", None)
    if not isinstance(linear, nn.Linear) or not isinstance(weight, Tensor):
        return None
    if hasattr(weight, "to_local"):
        weight = weight.to_local()
    # Floats of 8 bits come with scales.
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dtype in _FLOATS and weight.ndim == 2
    return weight.detach() if plain and not weight.is_meta else None


def is_linear(linear: Any, width: int) -> bool:
    """Tell whether a module is a linear layer of so many inputs, in whatever form it holds its weight."""
    return isinstance(linear, nn.Module) and getattr(linear, "in_features", None) == width


@torch.no_grad()
def weight_by_images(linear: nn.Module, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Find the weight [C, D] of a linear layer, in `dtype`, by what the layer itself makes of each unit vector.

    So the library that packed the weight unpacks it, active adapters are added, and a weight that lies elsewhere is
    brought in. Halving the difference to the opposite vector leaves the bias out.
    """
    parts = []
    for first in range(0, width, _ROWS):
        unit = torch.zeros(min(_ROWS, width - first), width, device=device, dtype=dtype)
        unit.diagonal(first).fill_(1)
        parts.append((linear(unit) - linear(-unit)) / 2)
    return torch.cat(parts).T.to(dtype)


def adapted_layer(decoder: nn.Module) -> Any | None:
    """Return a layer of PEFT that carries adapters, which tells those of all layers; None where there is none."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return None
    return next((module for module in decoder.modules() if isinstance(module, peft.BaseTunerLayer)), None)


def active_adapters(layer: Any | None) -> tuple[str, ...]:
    """Names of the adapters that act: those merged into the weights, and those active unless they are disabled."""
    if layer is None:
        return ()
    return tuple(sorted({*layer.merged_adapters, *(() if layer.disable_adapters else layer.active_adapters)}))


def forms_of(decoder: nn.Module) -> dict[str, tuple[torch.dtype, str]]:
    """Return dtype and device of each weight of a decoder, by name."""
    return {name: (weight.dtype, str(weight.device)) for name, weight in decoder.named_parameters()}


def check_forms(decoder: nn.Module, known: dict[str, tuple[torch.dtype, str]]) -> None:
    """Raise KvsieveError where weights were cast or moved since `known` was noted of them."""
    found = forms_of(decoder)
    for name, before in known.items():
        now = found.get(name, before)
        # What is brought in for each call lies nowhere in between.
        if now != before and "meta" not in (now[1], before[1]):
            raise KvsieveError(
                f"the weight {name} is {now[0]} on {now[1]} and was {before[0]} on {before[1]} when the plan was "
                "attached: leave the `with` block before the model is cast or moved, then attach again, with new caches"
            )


def why_out_of_reach(model: Any) -> str | None:
    """One clause saying why a model that is loaded has no device to take a prompt; None if it has."""
    if getattr(model, "hf_device_map", None) and model.device.type == "meta":
        return (
            "all its weights are on disk, its embeddings too, so no device takes a prompt; keep these in memory, as "
            "device_map='auto' does, or device_map={'model.embed_tokens': 'cpu', ...}"
        )
    return None


__all__ = [
    "active_adapters",
    "adapted_layer",
    "check_forms",
    "forms_of",
    "is_linear",
    "plain_weight",
    "weight_by_images",
    "why_out_of_reach",
]
