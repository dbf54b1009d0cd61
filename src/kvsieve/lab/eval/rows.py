"""Rows of a results directory: their fields, and JSON lines with checksums."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError, short

NUMBER = (int, float)
SAMPLE_FIELDS: dict[str, Any] = {
    "task": str,
    "length": int,
    "question": str,
    "sample": int,
    "label": str,
    "budget": (str, type(None)),
    "score": NUMBER,
}
COST_FIELDS: dict[str, Any] = {
    "length": int,
    "label": str,
    "budget": (str, type(None)),
    "repeat": int,
    "env": int,
    "new_tokens": int,
    "ttft_s": NUMBER,
    "token_s": list,
}
SAMPLE_KEY = ("task", "length", "question", "sample", "label", "budget")
# End of a row with a checksum.
_SEAL = re.compile(rb', "checksum": "([0-9a-f]{16})"\}\Z')
Row = dict[str, Any]


def sealed(row: Row) -> bytes:
    """Return a row as a line with a checksum at its end."""
    # A model's answer may hold half a character.
    text = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return text[:-1] + f', "checksum": "{_checksum(text)}"}}\n'.encode()


def unsealed(line: bytes, fields: Mapping[str, Any]) -> Row:
    """Return the row of a line with at least `fields`. Raises ValueError for an invalid or changed line.

    Rows of older versions, without a checksum, are accepted.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if isinstance(row, dict) and "checksum" in row:
        seal = _SEAL.search(line)
        if seal is None or _checksum(line[: seal.start()] + b"}") != seal[1].decode():
            raise ValueError("it does not match its checksum: it was damaged or changed after it was written")
        del row["checksum"]
    problem = row_problem(row, fields)
    if problem:
        raise ValueError(problem)
    return row


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def row_problem(row: Any, fields: Mapping[str, Any]) -> str | None:
    """Return a description of the first missing or mistyped field, or None for a valid row."""
    if not isinstance(row, dict):
        return f"expected an object, got {type(row).__name__}"
    for name, kind in fields.items():
        if name not in row:
            return f"{name!r} is missing"
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            return f"{name!r} is {short(row[name])}, expected {_kind_name(kind)}"
    if "score" in fields and not 0 <= row["score"] <= 1:
        return f"'score' is {short(row['score'])}, expected 0 to 1"
    return None


def _kind_name(kind: Any) -> str:
    names = {int: "an integer", str: "text", list: "a list", dict: "an object", NUMBER: "a number"}
    return names.get(kind, "text or null")


def document(row: Row) -> tuple[str, Any]:
    """Return the name of a sample's text, or the sample's own number."""
    named = (row.get("meta") or {}).get("document")
    return ("sample", row["sample"]) if named is None else ("document", str(named))


def groups(rows: Iterable[Row], key: Sequence[str], first_only: bool = False) -> dict[tuple[Any, ...], Any]:
    """Return rows by their values of `key`: lists, or only the first row of each."""
    found: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        name = tuple(row[part] for part in key)
        if first_only:
            found.setdefault(name, row)
        else:
            found.setdefault(name, []).append(row)
    return found


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cut_documents(rows: Iterable[Row]) -> list[str]:
    """Return a sentence for every task and length with truncated documents."""
    cuts: dict[tuple[str, int], dict[int, int]] = {}
    for row in rows:
        meta = row.get("meta") or {}
        if isinstance(meta.get("cut"), int) and isinstance(meta.get("document"), int):
            cuts.setdefault((row["task"], row["length"]), {})[meta["document"]] = meta["cut"]
    return [
        f"{task}: {sum(count > 0 for count in found.values())} of {len(found)} documents were cut to {length} tokens"
        for (task, length), found in cuts.items()
        if any(found.values())
    ]


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
    plain = read_bytes(file)
    name = packed_name(file)
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
