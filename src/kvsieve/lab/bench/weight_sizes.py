"""Bytes of a model's weights in the form that they are loaded in, before they are loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvsieve.lab.bench.geometry import Geometry
from kvsieve.models.gguf.file import GgufFile
from kvsieve.models.source import checkpoint_source, is_gguf


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights.

    Attributes:
        total: of all weights.
        number: mean of a number.
        buffer: of three weights like a layer's largest in the model's dtype, an MLP's, which long prompts dequantize; 0
            for plain weights.
        kinds: formats of the blocks; none for plain weights.
    """

    total: int
    number: float
    buffer: int = 0
    kinds: tuple[str, ...] = ()


def weight_sizes(
    geometry: Geometry,
    element: int,
    name: str | None = None,
    weights: str | None = None,
    config: Any = None,
) -> WeightSizes:
    """Return the bytes of a model's weights in a form.

    Args:
        geometry: of the model; with the model itself for "int8" and "int4", and with `config`.
        element: bytes of a number in the model's dtype.
        name: of the model; of a .gguf file the header is read.
        weights: form, of `kvsieve.models.load`.
        config: for float32 on a CPU, where a checkpoint's weights may stay as stored. None: these are of `element`.

    Raises:
        ModelNotFoundError, ModelLoadError: a .gguf file that cannot be read.
    """
    if weights in ("int8", "int4"):
        return _sizes(geometry.parameters, element, _packed(geometry, weights))
    if config is not None and weights is None:
        from kvsieve.models.stored import stored_kind

        if (kind := stored_kind(name, config)) is not None:
            return _sizes(geometry.parameters, element, _as_stored(geometry, kind))
    if name is not None and is_gguf(name) and weights is None:
        from kvsieve.kernels.cpu.quantized import FORMATS

        folder, options = checkpoint_source(name)
        tensors = GgufFile(os.path.join(folder, options["gguf_file"])).tensors.values()
        matrices = [tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.kind in FORMATS]
        blocks = (
            _Block(tensor.kind, math.prod(tensor.shape), tensor.nbytes, tensor.name.startswith("blk."))
            for tensor in matrices
        )
        return _sizes(sum(math.prod(tensor.shape) for tensor in tensors), element, blocks)
    return WeightSizes(geometry.parameters * element, element)


@dataclass(frozen=True)
class _Block:
    """A weight in blocks. kind: its format; numbers, nbytes: in it; inside: True for one of a decoder layer."""

    kind: str
    numbers: int
    nbytes: int
    inside: bool


def _packed(geometry: Geometry, weights: str) -> Iterable[_Block]:
    """Return the weights that packing a checkpoint puts in blocks."""
    from kvsieve.models.packed.layout import layout_of

    model = geometry.model
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, weight in layout_of(model, weights).packed.items():
        inside = model.get_submodule(name.removesuffix(".weight")) not in ends
        yield _Block(weight.kind, math.prod(weight.shape), weight.shape[0] * weight.row_bytes, inside)


def _as_stored(geometry: Geometry, kind: str) -> Iterable[_Block]:
    """Return the weights of a checkpoint that stay as stored."""
    from kvsieve.kernels.cpu.quantized import FORMATS
    from kvsieve.models.stored import stored_weights

    model = geometry.model
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for name in stored_weights(model) - model.all_tied_weights_keys.keys():
        module = model.get_submodule(name.removesuffix(".weight"))
        numbers = module.weight.numel()
        yield _Block(kind, numbers, numbers * FORMATS[kind].nbytes, module not in ends)


def _sizes(numbers: int, element: int, blocks: Iterable[_Block]) -> WeightSizes:
    """Return the bytes of `numbers` numbers: those of blocks as they are stored, others of `element` bytes."""
    found = list(blocks)
    total = sum(block.nbytes for block in found) + (numbers - sum(block.numbers for block in found)) * element
    largest = max((block.numbers for block in found if block.inside), default=0)
    return WeightSizes(total, total / numbers, 3 * largest * element, tuple(sorted({block.kind for block in found})))
