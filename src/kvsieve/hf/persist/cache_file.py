"""The safetensors file of a saved cache: written atomically, and checked before use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from kvsieve import folders
from kvsieve.errors import CacheFileError, InputError, MissingFileError, short
from kvsieve.lazy import Tensor, torch
from kvsieve.version import __version__

FORMAT = 6

MARK = "kvsieve_cache"
# Limit of safetensors for a file's own header; ours is a part of it.
_LONGEST = 100_000_000
DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield a saved cache's verified header, and its open file."""
    try:
        # safetensors reports unreadable files as missing, and blocks on pipes.
        with open(path, "rb", opener=_regular):
            pass
    except OSError as error:
        raise MissingFileError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        file = safe_open(os.fspath(path), "pt")
        metadata = file.metadata()
    except SafetensorError as error:
        raise CacheFileError(f"{path} is not a safetensors file, or not all of one: {error}") from error
    except OSError as error:
        raise CacheFileError(f"{path} cannot be read: {error.strerror or error}") from error
    with file:
        yield _header(path, metadata), file


def _regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    raise OSError(None, "it is not a file")


def _header(path: Any, metadata: dict[str, str] | None) -> dict[str, Any]:
    if "kvsieve" not in (metadata or {}):
        raise CacheFileError(f"{path} is a safetensors file without a cache of kvsieve in it")
    try:
        header = json.loads(metadata["kvsieve"])  # type: ignore[index]
        found = header[MARK]
        digest = header["sha256"]
        own_digest = header_digest(header)
    except (ValueError, LookupError, TypeError, RecursionError):
        raise changed(path, "its header cannot be read") from None
    if found != FORMAT:
        who = str(header.get("kvsieve"))[:20]
        raise CacheFileError(
            f"{path} is of format {short(found, 20)}, written by kvsieve {who}; this version, {__version__}, reads "
            f"format {FORMAT}: use the version that wrote it, or read the conversation again"
        )
    if digest != own_digest:
        raise changed(path, "its header does not match its checksum")
    return header


def changed(path: Any, how: str) -> CacheFileError:
    return CacheFileError(f"{path} was damaged or changed after it was written: {how}; use another copy")


def header_digest(header: dict[str, Any]) -> str:
    rest = {name: part for name, part in header.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of all tensors: their names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        part = tensors[name]
        total.update(f"{name}\n{DTYPES.get(str(part.dtype))}{list(part.shape)}\n".encode())
        total.update(as_bytes(part))
    return total.hexdigest()


def copied(part: Tensor) -> Tensor:
    """Return a copy, byte for byte, because a memory-mapped file may change after its check."""
    # Copied as bool, every byte but 0 would become 1.
    return part.view(torch.uint8).clone().view(torch.bool) if part.dtype == torch.bool else part.clone()


def as_bytes(part: Tensor) -> Any:
    """Return a buffer of a tensor's bytes, in order."""
    return part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write(file: BinaryIO, tensors: Mapping[str, Tensor], text: str) -> None:
    """Write the safetensors format, tensor by tensor, without a second copy of the cache."""
    # Wide dtypes first keeps all aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": {"kvsieve": text}}
    end = 0
    for name in order:
        part = tensors[name]
        start = end
        end += part.numel() * part.element_size()
        entries[name] = {"dtype": DTYPES[str(part.dtype)], "shape": list(part.shape), "data_offsets": [start, end]}
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > _LONGEST:
        raise OSError(None, f"its header takes {len(head)} bytes, and a file's may take {_LONGEST}")
    file.write(len(head).to_bytes(8, "little") + head)
    for name in order:
        file.write(as_bytes(tensors[name]))


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Return True if the file at `path` may be replaced: missing, empty, or written by `write`, even if damaged.

    Raises MissingFileError for an unreadable file.
    """
    begin = b'{"__metadata__": {"kvsieve"'
    try:
        with open(path, "rb", opener=_regular) as file:
            found = file.read(8 + len(begin))
    except FileNotFoundError:
        return True
    except OSError as error:
        raise MissingFileError(f"{path} cannot be read: {error.strerror or error}") from error
    return not found or found[8:] == begin


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], force: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` once it is completely on disk.

    Only its owner can read it, at any time; a replaced file keeps its owner's permissions. Raises InputError, unless
    `force`, if there is a file that is not a saved cache.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode if os.path.lexists(target) else stat.S_IFREG | 0o600
        if not stat.S_ISREG(mode):
            raise OSError(None, "it is there already and is not a file; choose another name")
        if not force and not is_ours(target):
            raise InputError(
                f"{path} is there already and is no file that kvsieve saved: it is not replaced; choose another name, "
                "delete it, or replace it by force (force=True, --force)"
            )
        with folders.replacing(target, 0o600) as file:
            yield file
            if mode & 0o600 != 0o600:
                os.chmod(file.name, mode & 0o600)
    except OSError as error:
        reason = error.strerror or error
        raise CacheFileError(f"{path} cannot be written: {reason}; what was there before is untouched") from error
