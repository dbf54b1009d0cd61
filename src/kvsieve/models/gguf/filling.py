"""Tensors of a GGUF file become the weights of a model."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvsieve.errors import KvsieveWarning
from kvsieve.kernels.cpu.quantized import FORMATS, PLAIN, QuantizedMatrix
from kvsieve.models.fetch import ModelLoadError
from kvsieve.models.gguf.file import GgufFile, GgufTensor
from kvsieve.models.quantized import QuantizedEmbedding, QuantizedLinear, is_table, keep_tied, layer_over
from kvsieve.text import first_few

# Factors of the rotation, which are part of the configuration.
_OF_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class _Names:
    """A model for transformers' map of names, without submodules: the map would go through each, which takes seconds.

    module: a model or its decoder; config: of the model.
    """

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.config = config
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return self._module.state_dict()

    def named_children(self) -> list[Any]:
        return []


def names_of(model: Any, processor: Any) -> dict[str, str]:
    """Return the names of a model's weights by those of a file's tensors."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    found: dict[str, str] = {}
    for path, module in (("", model), *((f"{name}.", child) for name, child in model.named_children())):
        names = get_gguf_hf_weights_map(_Names(module, model.config), processor, qual_name=path)
        found = names | found
    return found


class Filling:
    """Tensors of a file on their way into a model that has no memory for its parameters."""

    def __init__(self, file: GgufFile, model: Any, settings: dict[str, Any], dtype: torch.dtype) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self.file = file
        self.model = model
        self.dtype = dtype
        self.processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=settings)
        self.names = names_of(model, self.processor)
        self.blocks: dict[str, QuantizedMatrix] = {}
        # What a processor puts together of several tensors.
        self.parsed: dict[str, dict[str, Tensor]] = {"tensors": {}}
        self.dequantized: Counter[str] = Counter()

    def run(self) -> None:
        for tensor in self.file.tensors.values():
            if tensor.name not in _OF_CONFIG:
                self._place(tensor)
        for name, weight in self.parsed["tensors"].items():
            self._set(name, weight)
        for name, matrix in self.blocks.items():
            self._replace(name.removesuffix(".weight"), matrix)
        self._tie()
        absent = [name for name, weight in self.model.named_parameters() if weight.is_meta]
        if absent:
            raise self._error(f"it has no tensor for {first_few(absent)} of {type(self.model).__name__}")

    def tell(self) -> None:
        """Warn about large weights that are not in blocks."""
        if self.dequantized:
            kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(self.dequantized.items()))
            warnings.warn(
                f"weights of {self.file.path.name} that layers cannot read in blocks are dequantized to "
                f"{str(self.dtype).removeprefix('torch.')} in memory: {kinds}",
                KvsieveWarning,
                stacklevel=4,
            )

    def _place(self, tensor: GgufTensor) -> None:
        name = self.names.get(tensor.name)
        order = None if name is None else self._order(tensor, name)
        if name is not None and order is not None:
            self._keep(tensor, name, order)
            return
        try:
            result = self._processed(tensor.name, self._numbers(tensor))
        except Exception as error:
            raise self._error(f"transformers cannot read its tensor {tensor.name}: {error}") from error
        if result.name is None:
            self.dequantized[tensor.kind] += 1
            return
        if result.name not in self.names:
            raise self._error(
                f"its tensor {tensor.name} has no place in {type(self.model).__name__} of transformers, whose answers "
                "would differ: load it with weights='expand' to leave it out"
            )
        if len(tensor.shape) > 1:
            self.dequantized[tensor.kind] += 1
        self._set(self.names[result.name], torch.from_numpy(result.weights))

    def _order(self, tensor: GgufTensor, name: str) -> Tensor | None:
        """Return which rows of a tensor are the rows of its layer; None for weights that a layer cannot read so."""
        if tensor.kind not in FORMATS or len(tensor.shape) != 2 or not name.endswith(".weight"):
            return None
        module = self.model.get_submodule(name.removesuffix(".weight"))
        if not (_is_linear(module) or is_table(module)) or tuple(module.weight.shape) != tensor.shape:
            return None
        rows = tensor.shape[0]
        probe = np.arange(2 * rows, dtype=np.float64).reshape(rows, 2)
        try:
            moved = self._processed(tensor.name, probe).weights
        except ValueError:
            return None
        if moved.shape != probe.shape or not np.array_equal(moved[:, 1], moved[:, 0] + 1):
            return None
        order = torch.from_numpy(moved[:, 0] / 2).long()
        return order if torch.equal(order.sort().values, torch.arange(rows)) else None

    def _keep(self, tensor: GgufTensor, name: str, order: Tensor) -> None:
        rows = self.file.rows(tensor)
        as_stored = torch.equal(order, torch.arange(len(order)))
        if PLAIN.get(tensor.kind) == self.dtype:
            weight = rows.view(self.dtype)
            self._set(name, weight if as_stored else weight[order])
            return
        self.blocks[name] = QuantizedMatrix(rows, tensor.kind, None if as_stored else order)

    def _numbers(self, tensor: GgufTensor) -> np.ndarray[Any, Any]:
        import gguf

        rows = self.file.rows(tensor)
        if tensor.kind in PLAIN:
            return rows.view(PLAIN[tensor.kind]).float().numpy()
        return gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[tensor.kind])

    def _processed(self, name: str, weights: np.ndarray[Any, Any]) -> Any:
        return self.processor.process(
            weights=weights, name=name, tensor_key_mapping=self.names, parsed_parameters=self.parsed
        )

    def _set(self, name: str, weight: Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(path)
        parameters = dict(module.named_parameters(recurse=False))
        held = parameters.get(attribute, dict(module.named_buffers(recurse=False)).get(attribute))
        if held is None or held.shape != weight.shape:
            found = None if held is None else list(held.shape)
            raise self._error(f"its weight for {name} has shape {list(weight.shape)}, the model's is {found}")
        weight = weight.to(self.dtype)
        if attribute in parameters:
            setattr(module, attribute, nn.Parameter(weight))
        else:
            held.copy_(weight)

    def _replace(self, path: str, matrix: QuantizedMatrix) -> None:
        self.model.set_submodule(path, layer_over(self.model.get_submodule(path), matrix, self.dtype))

    def _tie(self) -> None:
        """Give outputs without a tensor of their own the table of the embeddings, for good."""
        for target, source in list(self.model.all_tied_weights_keys.items()):
            table = self.model.get_submodule(source.removesuffix(".weight"))
            path = target.removesuffix(".weight")
            layer = self.model.get_submodule(path)
            if isinstance(layer, QuantizedLinear) or not layer.weight.is_meta:
                continue
            if isinstance(table, QuantizedEmbedding):
                self._replace(path, table.matrix)
                self.model.tie_weights = keep_tied
            else:
                layer.weight = table.weight

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"cannot load {self.file.path}: {what}")


def _is_linear(module: nn.Module) -> bool:
    # Falcon's own class computes the same.
    return type(module) is nn.Linear or type(module).__name__ == "FalconLinear"
