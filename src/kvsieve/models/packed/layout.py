"""Weights of a model that are packed, and the layers that are put in for them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from kvsieve.kernels.cpu.quantized import FORMATS, QuantizedMatrix
from kvsieve.models.quantized import layer_over


class PackedWeight(NamedTuple):
    """Format of a packed weight. kind: of `FORMATS`; shape: [C, D]."""

    kind: str
    shape: tuple[int, int]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        layout = FORMATS[self.kind]
        return self.shape[1] // layout.size * layout.nbytes


class Layout(NamedTuple):
    """Weights of a model by parameter name.

    packed: formats of those that are packed; shared: tied ones, and the packed weight that each shares; plain: bytes of
    the matrices that stay in the model's dtype.
    """

    packed: dict[str, PackedWeight]
    shared: dict[str, str]
    plain: dict[str, int]


def layout_of(model: PreTrainedModel, weights: str) -> Layout:
    """Return which weights are packed and how: linear layers, input embeddings, and outputs tied to these.

    With "int8", all are Q8_0. With "int4", rows of a multiple of 256 numbers are Q4_K, other ones Q5_0. Embeddings and
    outputs remain Q8_0, because their errors reach every token. So do layers with at most a quarter as many outputs as
    the model is wide, such as keys and values under grouped queries: they are small, and many heads read them.
    """
    words = model.get_input_embeddings()
    ends = (words, model.get_output_embeddings())
    formats: dict[str, PackedWeight] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear or (type(module) is nn.Embedding and module is words):
            rows, inner = module.weight.shape
            if inner % 32:
                continue
            few = rows * 4 <= inner == words.embedding_dim
            small = "Q4_K" if inner % 256 == 0 else "Q5_0"
            kind = "Q8_0" if weights == "int8" or module in ends or few else small
            formats[f"{name}.weight"] = PackedWeight(kind, (rows, inner))
    tied = dict(model.all_tied_weights_keys)
    shared = {target: source for target, source in tied.items() if target in formats and source in formats}
    # Weights tied to one that is not packed stay with it.
    loose = {name for pair in tied.items() if pair[0] not in shared for name in pair}
    packed = {name: found for name, found in formats.items() if name not in shared and name not in loose}
    matrices = {name: weight for name, weight in model.named_parameters() if weight.ndim > 1 and name not in tied}
    return Layout(packed, shared, {name: weight.nbytes for name, weight in matrices.items() if name not in packed})


def put_in(model: PreTrainedModel, layout: Layout, matrices: dict[str, QuantizedMatrix], dtype: torch.dtype) -> None:
    """Replace layers of a model without memory by those over packed weights; biases are loaded with the rest."""
    for name in (*layout.packed, *layout.shared):
        path = name.removesuffix(".weight")
        module: Any = model.get_submodule(path)
        matrix = matrices[layout.shared.get(name, name)]
        replacement: Any = layer_over(module, matrix, dtype)
        # transformers would give a weight to layers that it takes for new ones.
        replacement._is_hf_initialized = True
        model.set_submodule(path, replacement)
    # The checkpoint has these, and the model has no parameters for them.
    absent = [f"^{re.escape(name)}$" for name in (*layout.packed, *layout.shared)]
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *absent}
    model.all_tied_weights_keys = {a: b for a, b in model.all_tied_weights_keys.items() if a not in layout.shared}
