"""Files of public benchmarks: finding a task's file, reading its rows, and naming the wrong row and field."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError, short

SUFFIXES = (".jsonl", ".jsonl.gz")
# Fields that identify a benchmark's rows.
_SIGNS = {
    "L-Eval": {"instructions", "outputs", "input"},
    "LongBench": {"context", "input", "answers", "all_classes"},
    "SCBench": {"multi_turns"},
    "RULER": {"index", "input", "outputs"},
    "InfiniteBench": {"context", "input", "answer"},
}


@dataclass(frozen=True)
class FileRow:
    """A checked row of a file. line: its number, from 1; values: by field."""

    file: Path
    line: int
    values: Mapping[str, Any]

    def wrong(self, what: str) -> InputError:
        return InputError(f"{self.file}, line {self.line}: {what}")


def find_file(data: str | Path, names: Sequence[str], task: str) -> Path:
    """Return the file of a task.

    Args:
        data: that file itself, or a directory that contains it at any depth.
        names: paths it may have, relative to any directory below `data`; the first match counts.
        task: for messages.

    Raises:
        InputError: there is none, or several.
    """
    root = Path(os.path.expanduser(data))
    if root.is_file():
        return root
    if not root.is_dir():
        raise InputError(f"--data {root} does not exist; give the directory with the file of {task}, or that file")
    for name in names:
        if (root / name).is_file():
            return root / name
    found = sorted({path for name in names for path in root.rglob(name) if path.is_file()})
    if not found:
        raise InputError(f"no rows of {task} in {root}: looked for {' or '.join(names)} there and in its directories")
    if len(found) > 1:
        raise InputError(f"several files could be {task}: {', '.join(map(str, found[:4]))}; give one of them as --data")
    return found[0]


def read_rows(file: Path, fields: Mapping[str, tuple[type, ...]], benchmark: str) -> list[FileRow]:
    """Read every row of a JSONL file, plain or gzip.

    Args:
        file: gzip if its name ends in .gz.
        fields: required fields of each row, with their types.
        benchmark: the rows' benchmark, for messages.

    Raises:
        InputError: the file cannot be read, is empty, or has an invalid line: named with line and field.
    """
    rows = [_row(file, line, text, fields, benchmark) for line, text in _lines(file)]
    if not rows:
        raise InputError(f"{file} has no rows; {_expected(fields, benchmark)}")
    return rows


def _lines(file: Path) -> list[tuple[int, str]]:
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read {file}: {error}; expected JSON lines in UTF-8, gzip where it ends in .gz"
        ) from error
    # Not splitlines: texts may contain line separators that JSON does not escape.
    return [(line, part) for line, part in enumerate(text.split("\n"), 1) if part.strip()]


def _row(file: Path, line: int, text: str, fields: Mapping[str, tuple[type, ...]], benchmark: str) -> FileRow:
    row = FileRow(file, line, {})
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise row.wrong(f"not JSON ({error}); {_expected(fields, benchmark)}, one a line") from error
    return checked_row(row, values, fields, benchmark)


def checked_row(row: FileRow, values: Any, fields: Mapping[str, tuple[type, ...]], benchmark: str) -> FileRow:
    """Return a row with its values; see `read_rows`. Raises InputError for invalid values."""
    if not isinstance(values, dict):
        raise row.wrong(f"expected an object, got {short(values)}; {_expected(fields, benchmark)}")
    for name, kinds in fields.items():
        if name not in values:
            raise row.wrong(f"{name!r} is missing{_other(values, benchmark)}; {_expected(fields, benchmark)}")
        if not isinstance(values[name], kinds) or isinstance(values[name], bool):
            kind = " or ".join(_KINDS[kind] for kind in kinds)
            raise row.wrong(f"{name!r} is {short(values[name])}, expected {kind}{_other(values, benchmark)}")
    return FileRow(row.file, row.line, values)


_KINDS = {str: "text", list: "a list", int: "a number", float: "a fraction", dict: "an object", type(None): "null"}


def _other(values: Mapping[str, Any], benchmark: str) -> str:
    names = [name for name, signs in _SIGNS.items() if signs <= set(values) and name != benchmark]
    return f" (this is a row of {names[0]})" if names else ""


def _expected(fields: Mapping[str, Any], benchmark: str) -> str:
    return f"expected rows of {benchmark}, with {', '.join(fields)}"
