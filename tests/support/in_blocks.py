"""Tiny models whose linear layers and embeddings are quantized, and their twins with dequantized weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from kvsieve.kernels.cpu.quantized import QuantizedMatrix
from kvsieve.models.quantized import QuantizedEmbedding, QuantizedLinear


def matrix_of(weight: torch.Tensor, kind: str) -> QuantizedMatrix:
    """Quantize a weight [C, D]."""
    import gguf

    rows = gguf.quantize(weight.detach().float().numpy(), gguf.GGMLQuantizationType[kind])
    return QuantizedMatrix(torch.from_numpy(rows).view(torch.uint8).view(len(weight), -1), kind)


def quantized(model: Any, kind: str = "Q8_0") -> tuple[Any, Any]:
    """Return a copy of a model with linear layers and embeddings in blocks, and its twin with dequantized weights."""
    blocks = copy.deepcopy(model)
    modules = dict(blocks.named_modules())
    embedding = blocks.get_input_embeddings()
    for name, module in modules.items():
        parent_name, _, own = name.rpartition(".")
        parent = modules[parent_name]
        if type(module) is nn.Linear and module.in_features % 32 == 0:
            matrix = matrix_of(module.weight, kind)
            setattr(parent, own, QuantizedLinear(matrix, module.bias, module.weight.dtype))
        elif module is embedding and type(module) is nn.Embedding:
            dtype = module.weight.dtype
            setattr(parent, own, QuantizedEmbedding(matrix_of(module.weight, kind), dtype, module.padding_idx))
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in blocks.named_modules():
            if isinstance(module, QuantizedLinear | QuantizedEmbedding):
                plain.get_submodule(name).weight.copy_(module.weight)
    return blocks.eval(), plain.eval()
