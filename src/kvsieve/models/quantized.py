"""Linear layers and embeddings over weights in blocks, which are read as they are stored."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvsieve.errors import KvsieveError
from kvsieve.kernels.cpu import quantized as kernel
from kvsieve.kernels.cpu.quantized import QuantizedMatrix


class _Scratch(threading.local):
    """Memory of this thread for one dequantized weight of each dtype, used again and again by prompts."""

    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, Tensor] = {}


_scratch = _Scratch()
# Files that models are mapped from, as they were then.
_mapped: WeakKeyDictionary[nn.Module, dict[Path, os.stat_result]] = WeakKeyDictionary()
# Methods that write into their tensor, besides those with names that end with one "_".
_WRITES = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "pow"))}


class DequantizedWeight(Tensor):
    """A dequantized copy of a weight in blocks, which stay as they are: writing to the copy raises KvsieveError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as with a plain tensor, which results other than views are."""
        name = func.__name__
        in_place = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        writes = func == Tensor.data.__set__  # type: ignore[attr-defined]
        if writes or (in_place and isinstance(args[0], cls)):
            raise _written()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and any(_shares(result, given) for given in args if isinstance(given, cls)):
                # A view, such as `weight.data`.
                return result.as_subclass(cls)
            return result


def _written() -> KvsieveError:
    return KvsieveError(
        "weights as they are stored cannot be written, nor adapters merged into them: leave adapters active, or load "
        "the model with weights='expand'"
    )


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class _InBlocks(nn.Module):
    """A layer with its weight in blocks."""

    matrix: QuantizedMatrix
    dtype: torch.dtype

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise _written()
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        if f"{prefix}weight" in state_dict:
            raise _written()
        super()._load_from_state_dict(state_dict, prefix, *more)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        numbers = self.matrix.numbers
        if numbers is not None:
            destination[f"{prefix}weight"] = numbers
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.dtype = _dtype_after(fn, self.dtype)
        return super()._apply(fn, recurse)


class QuantizedLinear(_InBlocks, nn.Linear):
    """A linear layer with its weight in blocks.

    Few tokens are multiplied with the blocks; for many, the weight is dequantized into a buffer.

    Args:
        matrix: the weight [C, D].
        bias: [C], of `dtype`, or None.
        dtype: of inputs and outputs: float32 or bfloat16.
    """

    def __init__(self, matrix: QuantizedMatrix, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features = matrix.inner
        self.out_features = matrix.width
        self.matrix = matrix
        self.dtype = dtype
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Weight [C, D], dequantized for the caller."""
        return self._copied().as_subclass(DequantizedWeight)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply [..., D]: [..., C]."""
        tokens = input.numel() // self.in_features
        if 0 < tokens <= kernel.MOST_ROWS and not self._computes_otherwise(input):
            return kernel.multiply(input.contiguous(), self.matrix, self.bias)
        return F.linear(input, self.dequantized(input), self.bias)

    def dequantized(self, given: Tensor) -> Tensor:
        """Return the weight for a product with `given`; the next layer's call may overwrite it."""
        if torch.is_grad_enabled() and given.requires_grad:
            return self._copied()
        return next(_dequantized([self]))

    def _copied(self) -> Tensor:
        return self.matrix.dequantize(torch.empty(self.out_features, self.in_features, dtype=self.dtype))

    def _computes_otherwise(self, given: Tensor) -> bool:
        if torch.is_grad_enabled() and given.requires_grad:
            return True
        if given.dtype != self.dtype or given.shape[-1] != self.in_features or type(given) is not Tensor:
            return True
        return torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.matrix.kind}"


class QuantizedEmbedding(_InBlocks, nn.Embedding):
    """Embeddings with their table in blocks: rows are dequantized as they are looked up.

    Args:
        matrix: the table [words, D].
        dtype: of the embeddings.
        padding_idx: as of `nn.Embedding`.
    """

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype, padding_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        self.num_embeddings = matrix.width
        self.embedding_dim = matrix.inner
        self.padding_idx = padding_idx
        self.max_norm = None
        self.norm_type = 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.matrix = matrix
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Table [words, D], dequantized for the caller."""
        table = self.matrix.dequantize(torch.empty(self.num_embeddings, self.embedding_dim, dtype=self.dtype))
        return table.as_subclass(DequantizedWeight)

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings [..., D] of token ids [...]."""
        return self.matrix.rows(input.flatten(), self.dtype).view(*input.shape, -1)


class ScaledEmbedding(QuantizedEmbedding):
    """Embeddings times a number, as Gemma has them. scale: a tensor []."""

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype, padding_idx: int | None, scale: Tensor) -> None:
        super().__init__(matrix, dtype, padding_idx)
        self.register_buffer("embed_scale", scale, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.get_buffer("embed_scale").to(self.dtype)


def is_table(module: nn.Module) -> bool:
    """Return True for embeddings, and those that are multiplied with a number."""
    scaled = type(module).__name__.endswith("ScaledWordEmbedding")
    return type(module) is nn.Embedding or (scaled and dict(module.named_buffers()).keys() == {"embed_scale"})


def layer_over(module: Any, matrix: QuantizedMatrix, dtype: torch.dtype) -> nn.Module:
    """Return the layer that computes as a linear layer or embedding does, over a matrix. dtype: of the computation."""
    if not is_table(module):
        return QuantizedLinear(matrix, module.bias, dtype)
    if type(module) is nn.Embedding:
        return QuantizedEmbedding(matrix, dtype, module.padding_idx)
    return ScaledEmbedding(matrix, dtype, module.padding_idx, module.embed_scale)


def keep_tied(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a model's `tie_weights`: layers that share a matrix have no parameters to tie."""


# Linear layers that compute each token alone.
LINEARS = (nn.Linear, QuantizedLinear)


def dtype_of(linear: nn.Linear) -> torch.dtype:
    """Return the dtype that a linear layer computes in."""
    return linear.dtype if isinstance(linear, QuantizedLinear) else linear.weight.dtype


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of all weights of a module, those in blocks included; shared ones count once."""
    plain = sum(parameter.nbytes for parameter in module.parameters())
    return plain + sum(matrix.nbytes for matrix in matrices_of(module))


def matrices_of(module: nn.Module) -> list[QuantizedMatrix]:
    """Return the weights in blocks of a module, each once."""
    parts = (part.matrix for part in module.modules() if isinstance(part, QuantizedLinear | QuantizedEmbedding))
    return list({matrix.data.data_ptr(): matrix for matrix in parts}.values())


def include_blocks(model: Any, way_out: str | None, files: Iterable[Path] = ()) -> None:
    """Let a loaded model's methods count its weights in blocks, or refuse to write them.

    Args:
        model: the model.
        way_out: the end of the errors of `state_dict` and `save_pretrained`, such as "load it with weights='expand'";
            None where all are plain numbers, which both write, but not over the files that they are mapped from.
        files: for `why_overwritten`.
    """
    _mapped[model] = {path.absolute(): path.stat() for path in files}
    model.num_parameters = functools.partial(_num_parameters, model)
    model.get_memory_footprint = functools.partial(_memory_footprint, model)
    if way_out is None:
        model.save_pretrained = functools.partial(_save_elsewhere, model)
        return
    model.state_dict = functools.partial(_state_dict, model, way_out)
    model.save_pretrained = functools.partial(_refuse_to_save, way_out)


def why_overwritten(model: Any) -> str | None:
    """Return which mapped file of a model was written to since it was loaded, or None; a replaced one stays mapped."""
    for path, before in _mapped.get(model, {}).items():
        now = path.stat() if path.exists() else before
        if os.path.samestat(before, now) and (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
            return f"{path} was written to since its weights were mapped, which may be others now; load the model again"
    return None


def _num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Count parameters as transformers does; blocks are not trainable, and shared ones count once."""
    found: int = type(model).num_parameters(model, only_trainable, exclude_embeddings)
    if only_trainable:
        return found
    tables = {part.matrix.data.data_ptr() for part in model.modules() if isinstance(part, QuantizedEmbedding)}
    counted = [m for m in matrices_of(model) if not (exclude_embeddings and m.data.data_ptr() in tables)]
    return found + sum(matrix.width * matrix.inner for matrix in counted)


def _memory_footprint(model: Any, return_buffers: bool = True) -> int:
    found: int = type(model).get_memory_footprint(model, return_buffers)
    return found + sum(matrix.nbytes for matrix in matrices_of(model))


def _state_dict(model: Any, way_out: str, *args: Any, **kwargs: Any) -> Any:
    """Return all weights but those in blocks to PEFT, which saves adapters by it; refuse other calls."""
    # A module around the model gives a destination; adapters within it leave their configurations.
    whole = not args and kwargs.get("destination") is None and "peft_config" not in vars(model)
    if whole and matrices_of(model):
        raise KvsieveError(f"state_dict() has no form for weights in blocks: {way_out}")
    return type(model).state_dict(model, *args, **kwargs)


def _save_elsewhere(model: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    if os.path.realpath(save_directory) == os.path.realpath(model.name_or_path):
        raise KvsieveError(
            f"the model computes with the files in {save_directory}, which cannot be written over: save it into "
            "another directory, or load it with weights='expand'"
        )
    return type(model).save_pretrained(model, save_directory, *args, **kwargs)


def _refuse_to_save(way_out: str, *_: Any, **__: Any) -> None:
    raise KvsieveError(f"weights in blocks cannot be saved as a checkpoint of transformers: {way_out}")


def dequantized_together(linears: Sequence[nn.Linear]) -> list[Tensor | None]:
    """Return the weights of layers in blocks for several products of each; None for other layers.

    The next call of such a layer may overwrite them.
    """
    found = _dequantized([linear for linear in linears if isinstance(linear, QuantizedLinear)])
    return [next(found) if isinstance(linear, QuantizedLinear) else None for linear in linears]


def _dequantized(linears: Sequence[QuantizedLinear]) -> Iterator[Tensor]:
    """Yield weights in this thread's buffer of their dtype, which grows and is not given back."""
    sizes = [linear.out_features * linear.in_features for linear in linears]
    if not linears:
        return
    dtype = linears[0].dtype
    buffer = _scratch.buffers.get(dtype)
    if buffer is None or buffer.numel() < sum(sizes):
        _scratch.buffers[dtype] = buffer = torch.empty(sum(sizes), dtype=dtype)
    for linear, part in zip(linears, buffer[: sum(sizes)].split(sizes), strict=True):
        yield linear.matrix.dequantize(part.view(linear.out_features, linear.in_features))


def _dtype_after(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that `nn.Module.to` asks for. Raises KvsieveError for another device."""
    found = fn(torch.empty(0, dtype=dtype))
    if found.device.type != "cpu":
        raise KvsieveError(
            f"weights as they are stored are computed with on a CPU, got device {found.device}: load the model with "
            "weights='expand' for other devices"
        )
    return found.dtype
