"""A results directory's finished rows, packed: FILE.gz holds the rows that come before those of FILE itself."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

from kvsieve.errors import InputError


def packed_name(file: Path) -> Path:
    """Where the packed rows of `file` are."""
    return file.with_name(f"{file.name}.gz")


def packed(data: bytes) -> bytes:
    """Compress, to bytes that depend on the data alone."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as out:
        out.write(data)
    return buffer.getvalue()


def contents(file: Path) -> list[tuple[Path, bytes]]:
    """Packed and plain rows of `file`, those that are there, each with the name of its own file.

    Raises InputError for a file that cannot be read, and for a packed one that is damaged.
    """
    # The plain file first: a run that ends now puts its rows into the packed one before it deletes it.
    plain, name = read_bytes(file), packed_name(file)
    compressed = read_bytes(name)
    found = [] if compressed is None else [(name, _unpacked(name, compressed))]
    return found if plain is None else [*found, (file, plain)]


def _unpacked(name: Path, compressed: bytes) -> bytes:
    try:
        return gzip.decompress(compressed)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{name} is damaged ({error}); restore it from a copy, or delete it and run its samples again"
        ) from error


def how_to_mend(file: Path) -> str:
    """Say how to get rid of a line that is broken."""
    return "delete the line" if file.suffix != ".gz" else "unpack it with gunzip, delete the line"


def read_bytes(file: Path) -> bytes | None:
    """Contents of a file; None where there is none. Raises InputError."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
