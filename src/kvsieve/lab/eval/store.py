"""Writer of results directories that loses at most the sample in progress if killed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from kvsieve.errors import InputError, KvsieveError
from kvsieve.folders import UNFINISHED, write_whole
from kvsieve.lab.eval.results import FORMAT, read_run
from kvsieve.lab.eval.rows import (
    COST_FIELDS,
    SAMPLE_FIELDS,
    SAMPLE_KEY,
    Row,
    contents,
    finite,
    how_to_mend,
    packed,
    packed_name,
    sealed,
    unsealed,
)
from kvsieve.lab.eval.texts import other_text, texts_of
from kvsieve.report.environment import UNRECORDED, environment, weights_digest

COST_KEY = ("length", "label", "budget", "repeat")
_LOCK = ".lock"
_FIXED = ("model", "dtype", "weights", "seed", "haystack", "draft")


class ResultsWriter:
    """Appends to DIR/samples.jsonl and DIR/costs.jsonl, packs both in the end, and writes DIR/run.json.

    run: identity of the evaluation: model, dtype, form of the weights, seed, haystack; the titles of its tasks; the
    digests of their texts (`data_digests`); and its settings, each with all parameters, or none if only `settle` adds
    them. A directory with results is continued only with `resume`, and only by a run that agrees in these. Written rows
    survive a kill or a power cut.

    Raises InputError otherwise, or if another process is writing there, and KvsieveError if a file cannot be written.
    """

    def __init__(self, folder: Path, run: Row, *, resume: bool) -> None:
        self.folder = folder
        # Before writing into a folder that may have other files.
        self._check(resume)
        with _named_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        try:
            self._open(run, resume)
        except BaseException:
            self.close()
            raise

    def _open(self, run: Row, resume: bool) -> None:
        # Again, since another process may have written meanwhile.
        self._check(resume)
        known = read_run(self.folder / "run.json") or {}
        for name in _FIXED if known else ():
            if known.get(name) != run.get(name):
                raise InputError(
                    f"'{self.folder}' holds results with {name} {known.get(name)!r}, this run has {run.get(name)!r}; "
                    "give the same, or write to another --out"
                )
        self.run = {"format": FORMAT, **run, "environments": [], "seconds": 0.0, **known}
        self.run["tasks"] = {**known.get("tasks", {}), **run["tasks"]}
        self.run["data"] = {**(texts_of(known) if known else {}), **run.get("data", {})}
        other = other_text(known, run) if known else None
        if other is not None:
            raise InputError(f"'{self.folder}' holds {other}; give the same text, or write to another --out")
        self.run["settings"] = self._merged(known.get("settings", []), run.get("settings", []))
        self.run["environments"] = [*self.run["environments"], environment()]
        self.env = len(self.run["environments"]) - 1
        self._before = float(self.run["seconds"])
        self._is_new = not known
        self.save(0.0)
        self.samples = _Lines(self.folder / "samples.jsonl", SAMPLE_FIELDS, SAMPLE_KEY)
        self.costs = _Lines(self.folder / "costs.jsonl", COST_FIELDS, COST_KEY)

    def _check(self, resume: bool) -> None:
        """Raise InputError for a folder with other files, or with results that must not be continued."""
        if (self.folder / "run.json").exists():
            if not resume:
                raise InputError(
                    f"'{self.folder}' holds results already; add --resume to continue or extend them, or give another "
                    "--out"
                )
        elif self.folder.exists() and any(not _is_left(entry.name) for entry in self.folder.iterdir()):
            raise InputError(f"'{self.folder}' is not empty and holds no results; give an empty or new --out")

    def _merged(self, known: list[Row], new: list[Row]) -> list[Row]:
        """Return the settings of both; rows with different parameters must not be mixed."""
        merged = {(setting["label"], setting["budget"]): setting for setting in known}
        for setting in new:
            before = merged.get((setting["label"], setting["budget"]), setting)
            merged[setting["label"], setting["budget"]] = setting
            # A parameter added since has its default here: given ones are in the label.
            if any(setting["parameters"].get(name) != value for name, value in before["parameters"].items()):
                raise InputError(
                    f"'{self.folder}' holds {setting['label']!r} with parameters {before['parameters']}, now they are "
                    f"{setting['parameters']}; name them as they were, or write to another --out"
                )
        return list(merged.values())

    def settle(self, settings: list[Row], model: Any = None) -> None:
        """Add facts of the loaded model: settings, and the sha256 of its weights.

        Raises:
            InputError: results of these settings were measured with other parameters, or with other weights.
        """
        self.run["settings"] = self._merged(self.run["settings"], settings)
        if model is None:
            return
        weights = weights_digest(model)
        for before in (stamp.get("weights") for stamp in self.run["environments"]):
            if before not in (None, UNRECORDED, weights):
                raise InputError(
                    f"'{self.folder}' holds results of the weights {before}, this model has {weights}; load the same "
                    "checkpoint, or write to another --out"
                )
        self.run["environments"][self.env]["weights"] = weights

    def save(self, seconds: float) -> None:
        """Write run.json; seconds: wall time of this invocation so far."""
        self.run["seconds"] = round(self._before + seconds, 1)
        text = json.dumps(self.run, indent=1) + "\n"
        with _named_errors(self.folder / "run.json"):
            write_whole(self.folder / "run.json", text)

    def pack(self) -> None:
        """Compress the rows of a finished run."""
        self.samples.pack()
        self.costs.pack()

    def lap(self) -> None:
        """Keep the time saved so far; the next `save` adds to it."""
        self._before = float(self.run["seconds"])

    def withdraw(self) -> None:
        """Delete run.json if this run made it and has no rows, so that a corrected run may take the directory."""
        if self._is_new and all(_is_left(entry.name) or entry.name == "run.json" for entry in self.folder.iterdir()):
            with contextlib.suppress(OSError):
                (self.folder / "run.json").unlink()

    def close(self) -> None:
        """Unlock the directory. The lock file stays: waiting processes must open the same one."""
        self._lock.close()


class _Lines:
    """One JSONL file: its existing rows, packed or not, and appending to it.

    Rows appended together state in `more` the number of rows that follow. An incomplete group, left by a killed
    process, is cut off, so that a unit is always computed as a whole and a resumed run equals an undisturbed one.
    """

    def __init__(self, file: Path, fields: Row, key: tuple[str, ...]) -> None:
        self.file = file
        self.fields = fields
        self.key = key
        packed_rows, lines, torn = self._read()
        found = len(lines)
        while lines and lines[-1][1].get("more"):
            lines.pop()
        if torn or len(lines) < found:
            with _named_errors(file):
                self._cut(sum(size for size, _ in lines))
        self.done = {tuple(row.get(name) for name in key) for row in [*packed_rows, *(row for _, row in lines)]}

    def _read(self) -> tuple[list[Row], list[tuple[int, Row]], bool]:
        """Return packed rows, plain rows with their sizes in bytes, and True if trailing data follow."""
        packed_rows: list[Row] = []
        plain: list[tuple[int, Row]] = []
        torn = False
        for part, data in contents(self.file):
            *lines, rest = data.split(b"\n")
            for number, line in enumerate(lines, 1):
                try:
                    row = unsealed(line, self.fields)
                except ValueError as error:
                    raise InputError(f"{part}, line {number}: {error}; {how_to_mend(part)} and resume") from error
                if part == self.file:
                    plain.append((len(line) + 1, row))
                else:
                    packed_rows.append(row)
            torn = part == self.file and bool(rest)
        return packed_rows, plain, torn

    def _cut(self, size: int) -> None:
        """Truncate to the first `size` bytes."""
        with open(self.file, "r+b", buffering=0) as out:
            os.ftruncate(out.fileno(), size)
            os.fsync(out.fileno())

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows; they count as done once all of them are on disk."""
        rows = list(rows)
        lines = [sealed({**finite(row), "more": len(rows) - at}) for at, row in enumerate(rows, 1)]
        size = self.file.stat().st_size if self.file.exists() else None
        with _named_errors(self.file):
            try:
                _append(self.file, b"".join(lines))
                if size is None:
                    _sync(self.file.parent)
            except OSError:
                # Half a row would block a resumed run.
                with contextlib.suppress(OSError):
                    self._cut(size or 0)
                raise
        self.done |= {tuple(row[name] for name in self.key) for row in rows}

    def pack(self) -> None:
        """Move all rows into the packed file.

        The plain file is deleted only once that is on disk; if killed in between, rows are in both, and the next run
        packs them once.
        """
        if not self.file.exists():
            return
        lines = dict.fromkeys(line for _, data in contents(self.file) for line in data.split(b"\n") if line)
        name = packed_name(self.file)
        with _named_errors(name):
            write_whole(name, packed(b"".join(line + b"\n" for line in lines)))
            os.unlink(self.file)
            _sync(self.file.parent)


def _is_left(name: str) -> bool:
    """Return True if a run that was killed before its first result may have left a file of this name."""
    return name == _LOCK or (name.startswith(".run.json.") and name.endswith(UNFINISHED))


def _append(file: Path, data: bytes) -> None:
    """Append all of `data` and sync it to disk."""
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(out, rest) :]
        os.fsync(out)
    finally:
        os.close(out)


def _sync(folder: Path) -> None:
    """Sync a folder's names to disk, if the system supports that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    """Name the file that cannot be written, and the state of the results, in errors."""
    try:
        yield
    except OSError as error:
        raise KvsieveError(
            f"{file} cannot be written: {error.strerror or error}; what was finished before is kept: mend that and go "
            "on with --resume"
        ) from error


def _lock(folder: Path) -> IO[str]:
    """Lock the directory while this process lives; without effect if the system has no such locks."""
    handle = open(folder / _LOCK, "a")  # noqa: SIM115
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.close()
            raise InputError(
                f"another process is writing to '{folder}'; wait for it or choose another --out"
            ) from error
        except OSError:
            pass
    return handle


@contextlib.contextmanager
def writing(folder: Path, run: Row, *, resume: bool) -> Iterator[ResultsWriter]:
    """A ResultsWriter that packs its rows on success, and unlocks the directory at the end."""
    writer = ResultsWriter(folder, run, resume=resume)
    try:
        yield writer
        writer.pack()
    except KvsieveError:
        writer.withdraw()
        raise
    finally:
        writer.close()
