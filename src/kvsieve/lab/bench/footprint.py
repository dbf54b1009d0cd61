"""Peak memory of a process with a model, from the model's config: weights, KV, and a pass over a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvsieve.cache.contract import MIN_ROOM
from kvsieve.devices import auto_dtype, default_device
from kvsieve.hf.generate.peak_memory import resident
from kvsieve.hf.model.context import context_of
from kvsieve.hf.model.memory import layer_bytes
from kvsieve.hf.model.shapes import LayerShape
from kvsieve.lab.bench.geometry import geometry
from kvsieve.lab.bench.weight_sizes import weight_sizes
from kvsieve.planning.plans import Plan

# Context of models without a limit of their own.
_ENDLESS = 1 << 18
# Peak bytes that an answer adds to the process: kernels, threads, blocks of attention.
_BESIDE = 128 << 20
# Memory of a process with torch and transformers, if the system does not report it.
_UNKNOWN = 512 << 20
# Weights of attention that methods make at once.
_BLOCK = 1 << 25
# Float32 numbers per query head and token that choosing entries takes; bytes per byte of KV that readers index it with.
_SCORES = 4
_INDEX = 0.5


@dataclass(frozen=True)
class Footprint:
    """Memory of a process with a model, in bytes.

    Attributes:
        model: on torch's meta device.
        shapes: of its layers.
        weights: of all weights, in the form that they are loaded in.
        buffer: into which prompts dequantize weights.
        copies: of weights, made by decode="auto".
        process: without the model.
        element: of a number in the model's dtype.
        outputs: numbers per token that the linear layers of one decoder layer output.
        context: tokens of the model's context.
    """

    model: Any
    shapes: tuple[LayerShape, ...]
    weights: int
    buffer: int
    copies: int
    process: int
    element: int
    outputs: float
    context: int

    def fixed(self, decode: str) -> int:
        """Return the bytes independent of prompts: weights, their buffer and copies, and the process."""
        return self.weights + self.buffer + self.process + (self.copies if decode == "auto" else 0)

    def kv(self, plan: Plan, tokens: int, chunk: int) -> int:
        """Return the peak bytes of one row's KV over `tokens` tokens of prompt and answer."""
        # An evictor drops entries once the whole prompt is stored, and a codec beside it encodes the rest.
        codec = None if plan.evict is not None else plan.codec
        exact = MIN_ROOM if codec is None else MIN_ROOM + codec.block + min(chunk, tokens)
        size = sum(layer_bytes(Plan(codec=codec), shape, self.element, tokens, most=True) for shape in self.shapes)
        size += sum(layer_bytes(Plan(), shape, self.element, exact) for shape in self.shapes if shape.kind.grows)
        return size if plan.read is None else round(size * (1 + _INDEX))

    def work(self, plan: Plan, tokens: int, chunk: int) -> int:
        """Return the peak bytes of a pass over a chunk of one row, after `tokens` tokens."""
        # A store that grows is copied; an encoded one is decoded, and joined with its newest entries.
        layer = max(layer_bytes(Plan(), shape, self.element, tokens) for shape in self.shapes)
        copies = 1 if plan.codec is None else 3
        numbers = 2 * min(chunk, tokens) * self.outputs + (tokens * self.outputs if plan.propagate else 0)
        chooses = any(part is not None for part in (plan.propagate, plan.evict, plan.read, plan.prefill))
        heads = max(shape.query_heads for shape in self.shapes)
        scores = 4 * _SCORES * tokens * heads if chooses else 0
        if plan.prefill is not None or plan.when.observes:
            # Weights of a whole chunk, block by block.
            scores += 4 * 3 * min(tokens * heads * min(chunk, tokens), _BLOCK)
        return round(copies * layer + numbers * self.element + scores)


def footprint(
    config: Any,
    dtype: str = "auto",
    device: str | None = None,
    name: str | None = None,
    weights: str | None = None,
) -> Footprint:
    """Return the footprint of a model in this process, before weights are loaded.

    On a GPU it is that of the GPU's memory.

    Args:
        config: of the model, from transformers.
        dtype: of its weights: "auto", "checkpoint", or a name such as "float32".
        device: default: the best one here.
        name: of the model; None for the demo model.
        weights: their form, of `kvsieve.models.load`.

    Raises:
        UnsupportedModelError: the shapes of the model's layers are not known.
    """
    found = geometry(config)
    where = torch.device(default_device() if device is None else device)
    chosen = auto_dtype(where).dtype if dtype == "auto" else getattr(torch, dtype, config.dtype or torch.float32)
    on_cpu = where.type == "cpu"
    is_wide = on_cpu and chosen == torch.float32
    # Weights in blocks are for CPUs.
    sizes = weight_sizes(found, chosen.itemsize, name if on_cpu else None, weights, config if is_wide else None)
    return Footprint(
        model=found.model,
        shapes=found.shapes,
        weights=sizes.total,
        buffer=sizes.buffer,
        copies=sizes.total // 2 if is_wide and not sizes.kinds else 0,
        process=_BESIDE + ((resident() or _UNKNOWN) if on_cpu else 0),
        element=chosen.itemsize,
        outputs=max(layer.outputs for layer in found.layers),
        context=context_of(config) or _ENDLESS,
    )
