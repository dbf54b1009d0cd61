"""Bytes of a model's weights in the form that they are loaded in, before they are loaded."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from kvsieve.lab.bench.geometry import Geometry
from kvsieve.models.gguf.file import GgufFile
from kvsieve.models.source import checkpoint_source

# Bits of a number in blocks, scales included.
_BITS = {"int8": 8.5, "int4": 4.5}


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights.

    Attributes:
        total: of all weights.
        number: mean of a number.
        buffer: of the largest linear layer's weight in the model's dtype, which prompts dequantize; 0 for plain
            weights.
        kinds: formats of the blocks; none for plain weights.
    """

    total: int
    number: float
    buffer: int = 0
    kinds: tuple[str, ...] = ()


def weight_sizes(geometry: Geometry, element: int, name: str | None = None, weights: str | None = None) -> WeightSizes:
    """Return the bytes of a model's weights in a form.

    Args:
        geometry: of the model.
        element: bytes of a number in the model's dtype.
        name: of the model; of a .gguf file the header is read.
        weights: form, of `kvsieve.models.load`.

    Raises:
        ModelNotFoundError, ModelLoadError: a .gguf file that cannot be read.
    """
    if weights in _BITS:
        packed = round((geometry.linear_parameters + geometry.table_parameters) * _BITS[weights] / 8)
        rest = geometry.parameters - geometry.linear_parameters - geometry.table_parameters
        total = packed + rest * element
        return WeightSizes(total, total / geometry.parameters, geometry.largest_linear * element, (weights,))
    if name is not None and name.endswith(".gguf") and weights is None:
        return _stored(name, element)
    return WeightSizes(geometry.parameters * element, element)


def _stored(name: str, element: int) -> WeightSizes:
    """Return the bytes of a .gguf file's weights: matrices as they are stored, others in the model's dtype."""
    from kvsieve.kernels.cpu.quantized import FORMATS

    folder, options = checkpoint_source(name)
    tensors = GgufFile(os.path.join(folder, options["gguf_file"])).tensors.values()
    blocks = [tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.kind in FORMATS]
    numbers = sum(math.prod(tensor.shape) for tensor in tensors)
    others = numbers - sum(math.prod(tensor.shape) for tensor in blocks)
    total = sum(tensor.nbytes for tensor in blocks) + others * element
    inside = (math.prod(tensor.shape) for tensor in blocks if tensor.name.startswith("blk."))
    kinds = sorted({tensor.kind for tensor in blocks})
    return WeightSizes(total, total / numbers, max(inside, default=0) * element, tuple(kinds))
