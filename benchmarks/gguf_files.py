"""GGUF files for measurements: metadata copied from another file, weights of another type or random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Fields that the writer fills in by itself.
OWN_FIELDS = ("general.architecture", "general.file_type")


def opened_like(reader: gguf.GGUFReader, target: Path, kind: str, changed: Mapping[str, Any] | None = None) -> Any:
    """Return a writer of a file with the metadata of another one.

    Args:
        reader: of the other file.
        target: path of the new file.
        kind: of its weights, such as Q8_0 or Q4_K_M.
        changed: values of fields that differ.
    """
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in OWN_FIELDS:
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, (changed or {}).get(name, field.contents()), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    return writer


def converted(source: Path, target: Path, kind: str) -> Path:
    """Write a file whose quantized weights are of another type, all else as it is; returns its path.

    Args:
        source: GGUF file.
        target: path of the new file.
        kind: F16, BF16, Q8_0, or another type that the package gguf quantizes to.
    """
    reader = gguf.GGUFReader(source)
    writer = opened_like(reader, target, kind)
    raw = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def described_file(file: Path) -> dict[str, Any]:
    """Return the name of a file's type, its bytes, and the bytes of its weights by their types."""
    reader = gguf.GGUFReader(file)
    kind = gguf.LlamaFileType(int(reader.fields["general.file_type"].contents())).name.removeprefix("MOSTLY_")
    types: Counter[str] = Counter()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_bytes)
    return {"kind": kind, "bytes": file.stat().st_size, "types": dict(types.most_common())}


def random_blocks(draw: np.random.Generator, rows: int, inner: int, kind: str) -> np.ndarray:
    """Return a random weight in blocks, uint8 [rows, bytes], whose numbers have mean 0 and deviate by about 0.02.

    Args:
        draw: of the bytes.
        rows: of the weight.
        inner: its columns, a multiple of 256.
        kind: Q4_K or Q6_K.
    """
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = draw.integers(0, 256, (rows, inner // size, nbytes), dtype=np.uint8)
    # A block is scale * sixteenths * integers; random bytes as its float16 scale would be infinite or no number.
    if kind == "Q4_K":
        blocks[..., :4] = np.array([7.7e-5, 7.5 * 7.7e-5], np.float16).view(np.uint8)
    else:
        blocks[..., -2:] = np.array([1.5e-5], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
