"""Files of packed weights: GGUF, with tensors named as transformers names parameters."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from kvsieve.models.fetch import ModelLoadError
from kvsieve.models.packed.blocks import pack
from kvsieve.models.packed.layout import Layout, layout_of

_ARCHITECTURE = "kvsieve-packed"


class PackingPass:
    """The pass that writes a checkpoint's packed weights into a new file.

    Args:
        path: of the file; its directory exists.
        weights: "int8" or "int4".
    """

    takes = True

    def __init__(self, path: Path, weights: str) -> None:
        self.path = path
        self.weights = weights
        self.layout: Layout
        self.places: dict[str, int] = {}
        self.written: set[str] = set()
        self.error: Exception | None = None

    def begin(self, model: PreTrainedModel) -> None:
        """Write the header. Raises ModelLoadError if no weight can be packed, and OSError."""
        self.layout = layout_of(model, self.weights)
        if not self.layout.packed:
            raise ModelLoadError(
                f"{type(model).__name__} has no linear layer whose width divides by 32, got weights={self.weights!r}: "
                "load it without"
            )
        try:
            self._write_header()
        except OSError as error:
            self.error = error
            raise

    def take(self, name: str, tensor: Tensor) -> None:
        """Pack a tensor, unless it stays plain. The first error is kept for `finish`: the loader would swallow it."""
        name = self.layout.shared.get(name, name)
        if self.error is not None or name not in self.layout.packed:
            return
        try:
            self._write(name, tensor)
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        """Write the file through to the disk.

        Raises:
            ModelLoadError: the checkpoint lacks a weight, or has one that is not finite or of another shape.
            OSError: the disk is full, or another error of it.
        """
        if self.error is not None:
            raise self.error
        absent = sorted(self.layout.packed.keys() - self.written)
        if absent:
            raise ModelLoadError(f"the checkpoint has no {absent[0]} ({len(absent)} such): it is not complete")
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def _write_header(self) -> None:
        import gguf
        import numpy as np

        writer = gguf.GGUFWriter(self.path, _ARCHITECTURE)
        for name, (kind, (rows, _)) in self.layout.packed.items():
            row = self.layout.packed[name].row_bytes
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(name, (rows, row), np.dtype(np.uint8), rows * row, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        end = self.path.stat().st_size
        for name, weight in self.layout.packed.items():
            self.places[name] = end = gguf.GGUFWriter.ggml_pad(end, writer.data_alignment)
            end += weight.shape[0] * weight.row_bytes
        if shutil.disk_usage(self.path.parent).free < end:
            raise OSError(errno.ENOSPC, f"{end / 1e9:.1f} GB are needed", str(self.path.parent))
        os.truncate(self.path, end)

    def _write(self, name: str, tensor: Tensor) -> None:
        weight = self.layout.packed[name]
        if tuple(tensor.shape) != weight.shape:
            raise ModelLoadError(f"{name} has shape {list(tensor.shape)}, expected {list(weight.shape)}")
        if not all(math.isfinite(end) for end in tensor.aminmax()):
            raise ModelLoadError(f"{name} has infinite numbers, or ones that are not numbers: it cannot be packed")
        data = pack(tensor, weight.kind).numpy()
        with open(self.path, "r+b") as file:
            file.seek(self.places[name])
            if name in self.written and file.read(data.nbytes) != bytes(data.data):
                raise ModelLoadError(
                    f"{name} is tied to another weight by the configuration, but the checkpoint has different numbers "
                    "for the two: set tie_word_embeddings to false in its config.json"
                )
            file.seek(self.places[name])
            file.write(data.data)
        self.written.add(name)
