"""The safetensors file of a saved cache: written whole or not at all, and checked before it is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvsieve.errors import CacheFileError

FORMAT = 1

MARK = "kvsieve_cache"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], Any]]:
    """A saved cache's header, known to be whole, and its open file."""
    try:
        with safe_open(os.fspath(path), "pt") as file:
            yield _header(path, file.metadata()), file
    except SafetensorError as error:
        raise CacheFileError(f"{path} is not a safetensors file, or not all of one: {error}") from error
    except OSError as error:
        raise CacheFileError(f"{path} cannot be read: {error}") from error


def _header(path: Any, metadata: dict[str, str] | None) -> dict[str, Any]:
    if "kvsieve" not in (metadata or {}):
        raise CacheFileError(f"{path} is a safetensors file without a cache of kvsieve in it")
    try:
        header = json.loads(metadata["kvsieve"])  # type: ignore[index]
        found, digest = header[MARK], header["sha256"]
    except (ValueError, LookupError, TypeError):
        raise changed(path, "its header cannot be read") from None
    if found != FORMAT:
        raise CacheFileError(
            f"{path} is of format {found!r}, written by kvsieve {header.get('kvsieve')}; this version, {version()}, "
            f"reads format {FORMAT}: use the version that wrote it, or read the conversation again"
        )
    if digest != header_digest(header):
        raise changed(path, "its header does not match its checksum")
    return header


def changed(path: Any, how: str) -> CacheFileError:
    return CacheFileError(f"{path} was damaged or changed after it was written: {how}; use another copy")


def header_digest(header: dict[str, Any]) -> str:
    rest = {name: part for name, part in header.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of all tensors: their names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        part = tensors[name]
        total.update(f"{name}\n{DTYPES.get(part.dtype)}{list(part.shape)}\n".encode())
        total.update(as_bytes(part))
    return total.hexdigest()


def copied(part: Tensor) -> Tensor:
    """A copy, byte for byte, because a file that is mapped into memory may change after it was checked."""
    # Copied as bool, every byte but 0 would become 1.
    return part.view(torch.uint8).clone().view(torch.bool) if part.dtype == torch.bool else part.clone()


def as_bytes(part: Tensor) -> Any:
    """A buffer of a tensor's bytes, in order."""
    return part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write(file: BinaryIO, tensors: Mapping[str, Tensor], text: str) -> None:
    """The safetensors format, tensor by tensor, so that no second copy of the cache is made."""
    # Wide dtypes first keeps all aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": {"kvsieve": text}}
    end = 0
    for name in order:
        part, start = tensors[name], end
        end += part.numel() * part.element_size()
        entries[name] = {"dtype": DTYPES[part.dtype], "shape": list(part.shape), "data_offsets": [start, end]}
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    file.write(len(head).to_bytes(8, "little") + head)
    for name in order:
        file.write(as_bytes(tensors[name]))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once it is written in full and on the disk."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:64]}.{uuid.uuid4().hex[:12]}.tmp")
    if os.path.exists(target) and not os.path.isfile(target):
        raise CacheFileError(f"{path} cannot be written: it is there already and is not a file; choose another name")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        with safe_open(temporary, "pt"):
            pass  # refuses a header of more than 100 MB
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, (OSError, SafetensorError)):
            reason = getattr(error, "strerror", None) or error
            raise CacheFileError(f"{path} cannot be written: {reason}; what was there before is untouched") from error
        raise
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def version() -> str:
    # Imported here because the package imports this module.
    import kvsieve

    return kvsieve.__version__
