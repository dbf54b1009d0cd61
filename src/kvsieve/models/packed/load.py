"""Loading of a checkpoint with packed weights, and the directory of its packed file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvsieve.errors import KvsieveWarning
from kvsieve.folders import cache_dir, make_private
from kvsieve.models.fetch import ModelLoadError, scratch_dir
from kvsieve.models.source import check_weights, checkpoint_source, load_error, quantization_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from kvsieve.kernels.cpu.quantized import QuantizedMatrix
    from kvsieve.models.packed.hooks import Pass

Weights = Literal["int8", "int4"]

# Part of a packed file's name: raise it when packing gives other bytes or chooses other formats.
VERSION = 1
# Pieces of a file of weights that are read to identify it, and bytes of each.
_SAMPLES = 16
_SAMPLE = 4096
# Told: matrices that are not packed, from this share of a model's bytes on.
_SHARE = 0.05


def load_packed(name: str, dtype: torch.dtype | str, weights: Weights) -> PreTrainedModel:
    """Load a checkpoint on the CPU, in eval mode, with packed weights.

    The first call packs one tensor at a time into a file of `packed_dir`. Later calls map that file and read only the
    rest of the checkpoint. A changed checkpoint is packed again, a damaged file too, with a warning.

    Args:
        name: directory of a transformers checkpoint, or a hub id.
        dtype: of plain weights and of activations: float32 or bfloat16; "auto": the checkpoint's own.
        weights: "int8" or "int4"; `layout.layout_of` has the formats.

    Raises:
        ModelNotFoundError: no such checkpoint.
        ModelLoadError: the checkpoint is quantized already, has no layer that can be packed or does not load; or the
            cache directory cannot be written.
    """
    source, options = checkpoint_source(name)
    check_weights(name)
    config = _config(name, source, options, weights)
    # Before the checkpoint is packed, which takes long.
    _check_dtype(config.dtype if dtype == "auto" else dtype)
    path = packed_dir() / f"{Path(source).name}-{weights}-{_identity(source, options, weights)}.gguf"
    checkpoint = _Checkpoint(name, source, options, weights, path)
    matrices = _opened(path)
    try:
        return checkpoint.mapped(checkpoint.packed() if matrices is None else matrices, dtype)
    except _OtherLayoutError:
        warnings.warn(f"kvsieve: packing weights anew: {path} has others than its model", stacklevel=3)
        path.unlink(missing_ok=True)
        return checkpoint.mapped(checkpoint.packed(), dtype)


def packed_dir() -> Path:
    """Return the directory of packed weights, which need not exist. Its files may be deleted at any time."""
    return cache_dir() / "packed"


class _OtherLayoutError(Exception):
    """A file of packed weights other than those that a model has."""


class _MappingPass:
    """The pass that loads a model around packed weights."""

    takes = False
    error: Exception | None = None

    def __init__(self, matrices: dict[str, QuantizedMatrix], weights: Weights) -> None:
        self.matrices = matrices
        self.weights = weights
        self.plain: dict[str, int] = {}

    def begin(self, model: PreTrainedModel) -> None:
        from kvsieve.models.packed.layout import layout_of, put_in

        dtype = model.dtype
        _check_dtype(dtype)
        layout = layout_of(model, self.weights)
        found = {name: (matrix.kind, (matrix.width, matrix.inner)) for name, matrix in self.matrices.items()}
        if found != {name: tuple(weight) for name, weight in layout.packed.items()}:
            raise _OtherLayoutError
        self.plain = layout.plain
        put_in(model, layout, self.matrices, dtype)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        raise AssertionError


class _Checkpoint:
    """One checkpoint to load. name: as given; source, options: of `checkpoint_source`; path: of its packed file."""

    def __init__(self, name: str, source: str, options: dict[str, Any], weights: Weights, path: Path) -> None:
        self.name = name
        self.source = source
        self.options = options
        self.weights = weights
        self.path = path

    def packed(self) -> dict[str, QuantizedMatrix]:
        """Pack the checkpoint into the file, unless another process has, and map it. Raises ModelLoadError."""
        import torch

        from kvsieve.models.packed.file import PackingPass

        with scratch_dir() as folder:
            if (found := _opened(self.path)) is not None:
                return found
            print(f"kvsieve: packing {self.name} as {self.weights}, once, into {self.path}", file=sys.stderr)
            packing = PackingPass(folder / self.path.name, self.weights)
            try:
                # Numbers of 16 bits are exact in float32.
                self.model(torch.float32, packing)
                packing.finish()
                make_private(self.path.parent)
                os.replace(packing.path, self.path)
            except OSError as exc:
                raise ModelLoadError(
                    f"cannot write the packed weights of {self.name!r} to {self.path} ({exc}); make room, or set "
                    "KVSIEVE_CACHE to another directory"
                ) from exc
        if (found := _opened(self.path)) is None:
            raise ModelLoadError(f"{self.path} was deleted while it was opened; try again")
        return found

    def mapped(self, matrices: dict[str, QuantizedMatrix], dtype: torch.dtype | str) -> PreTrainedModel:
        """Return the model over mapped weights. Raises ModelLoadError, and _OtherLayoutError."""
        from kvsieve.models.quantized import include_blocks

        mapping = _MappingPass(matrices, self.weights)
        model: Any = self.model(dtype, mapping)
        plain = sum(mapping.plain.values())
        if plain > _SHARE * (plain + sum(matrix.nbytes for matrix in matrices.values())):
            largest = max(mapping.plain, key=mapping.plain.__getitem__)
            warnings.warn(
                f"{len(mapping.plain)} weights of {self.name} ({plain / 1e6:,.0f} MB) stay in "
                f"{str(model.dtype).removeprefix('torch.')}, such as {largest}",
                KvsieveWarning,
                stacklevel=4,
            )
        include_blocks(model, f"copy {self.name}, or load it without weights={self.weights!r}")
        return model

    def model(self, dtype: torch.dtype | str, loading: Pass) -> PreTrainedModel:
        """Load the model with a pass. Raises ModelLoadError, and the pass's errors."""
        from transformers import AutoModelForCausalLM

        from kvsieve.models.packed.hooks import Hooked

        try:
            return AutoModelForCausalLM.from_pretrained(
                self.source, dtype=dtype, quantization_config=Hooked(loading), **self.options
            )
        except (ModelLoadError, _OtherLayoutError):
            raise
        except Exception as exc:
            if exc is loading.error:
                raise
            raise load_error(f"cannot load {self.name!r}", self.options, exc) from exc


def _config(name: str, source: str, options: dict[str, Any], weights: Weights) -> PreTrainedConfig:
    """Return the configuration of a checkpoint. Raises ModelLoadError for checkpoints that cannot be packed."""
    import importlib.util

    from transformers import AutoConfig

    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(f"weights={weights!r} needs the package gguf; run `pip install 'kvsieve[gguf]'`")
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except Exception as exc:
        raise load_error(f"cannot load {name!r}", options, exc) from exc
    if found := quantization_of(config):
        raise ModelLoadError(
            f"{name!r} is quantized already ({found.get('quant_method', 'in a format of its own')}): leave "
            f"weights={weights!r} out, or name a checkpoint with plain weights"
        )
    return config


def _check_dtype(dtype: torch.dtype | str | None) -> None:
    """Raise ModelLoadError for a dtype that packed weights are not computed with; one that is not known yet passes."""
    import torch

    if isinstance(dtype, torch.dtype) and dtype not in (torch.float32, torch.bfloat16):
        raise ModelLoadError(
            f"packed weights are computed with in float32 or bfloat16, got dtype {dtype}: ask for one of these"
        )


def _identity(source: str, options: dict[str, Any], weights: Weights) -> str:
    """Return a hash of a hub's commit, or of a directory's files: names, sizes, times of change, samples of bytes."""
    from transformers.utils import cached_file

    digest = hashlib.sha256(f"{VERSION} {weights} ".encode())
    if not options["local_files_only"]:
        config = cached_file(source, "config.json") or ""
        digest.update(f"{source} {Path(config).parent.name}".encode())
        return digest.hexdigest()[:16]
    kinds = ("*.safetensors", "*.bin", "config.json")
    for path in sorted(path for kind in kinds for path in Path(source).glob(kind)):
        facts = path.stat()
        digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns} ".encode())
        with open(path, "rb") as file:
            for piece in range(_SAMPLES):
                file.seek(facts.st_size * piece // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _opened(path: Path) -> dict[str, QuantizedMatrix] | None:
    """Map a packed file; None for a missing or, with a warning, a damaged one."""
    from kvsieve.kernels.cpu.quantized import QuantizedMatrix
    from kvsieve.models.gguf.file import GgufFile

    if not path.exists():
        return None
    try:
        file = GgufFile(path)
        return {name: QuantizedMatrix(file.rows(tensor), tensor.kind) for name, tensor in file.tensors.items()}
    except (ModelLoadError, KeyError, ValueError) as error:
        warnings.warn(f"kvsieve: packing weights anew: {error}", stacklevel=4)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
