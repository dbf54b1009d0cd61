"""Writing a results directory so that a kill at any point loses at most the sample in progress."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvsieve.bench.environment import environment
from kvsieve.errors import InputError
from kvsieve.eval.results import FORMAT, SAMPLE_KEY, Row, finite

COST_KEY = ("length", "label", "budget", "repeat")
_LOCK = ".lock"
_FIXED = ("model", "dtype", "seed", "haystack")


class ResultsWriter:
    """Appends to DIR/samples.jsonl and DIR/costs.jsonl and keeps DIR/run.json.

    run: what identifies the evaluation: model, dtype, seed, haystack; the titles of its tasks, and its settings, each
    with all parameters. A directory that holds results already is only continued with `resume`, and only by a run that
    agrees in these.

    Raises InputError otherwise, or when another process is writing there.
    """

    def __init__(self, folder: Path, run: Row, *, resume: bool) -> None:
        self.folder = folder
        known = self._known(resume)
        for name in _FIXED if known else ():
            if known[name] != run[name]:
                raise InputError(
                    f"'{folder}' holds results with {name} {known[name]!r}, this run has {run[name]!r}; give the same, "
                    "or write to another --out"
                )
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder)
        self.run = {"format": FORMAT, **run, "environments": [], "seconds": 0.0, **known}
        self.run["tasks"] = {**known.get("tasks", {}), **run["tasks"]}
        self.run["settings"] = self._merged(known.get("settings", []), run["settings"])
        self.run["environments"] = [*self.run["environments"], environment()]
        self.env = len(self.run["environments"]) - 1
        self.samples = _Lines(folder / "samples.jsonl", SAMPLE_KEY, SAMPLE_KEY[:4])
        self.costs = _Lines(folder / "costs.jsonl", COST_KEY, ("env", "length", "repeat"))
        self._before = float(self.run["seconds"])
        self.save(0.0)

    def _known(self, resume: bool) -> Row:
        file = self.folder / "run.json"
        if not file.exists():
            if self.folder.exists() and any(self.folder.iterdir()):
                raise InputError(f"'{self.folder}' is not empty and holds no results; give an empty or new --out")
            return {}
        if not resume:
            raise InputError(
                f"'{self.folder}' holds results already; add --resume to continue or extend them, or give another --out"
            )
        try:
            known = json.loads(file.read_bytes())
        except ValueError as error:
            raise InputError(f"{file} is not JSON ({error}); choose another --out") from error
        if known.get("format") != FORMAT or any(name not in known for name in _FIXED):
            raise InputError(f"{file} was written by another version of kvsieve; choose another --out")
        return known

    def _merged(self, known: list[Row], new: list[Row]) -> list[Row]:
        """Settings of both; where parameters (a default, say) have changed, rows must not be mixed."""
        held = {(each["label"], each["budget"]): each for each in known}
        for each in new:
            before = held.get((each["label"], each["budget"]), each)
            held[each["label"], each["budget"]] = each
            # A parameter that a method has gained since stands at its default here: given ones are in the label.
            if any(each["parameters"].get(name) != value for name, value in before["parameters"].items()):
                raise InputError(
                    f"'{self.folder}' holds {each['label']!r} with parameters {before['parameters']}, now they are "
                    f"{each['parameters']}; name them as they were, or write to another --out"
                )
        return list(held.values())

    def save(self, seconds: float) -> None:
        """Write run.json; seconds: wall time of this invocation so far."""
        self.run["seconds"] = round(self._before + seconds, 1)
        file = self.folder / "run.json"
        draft = file.with_suffix(".json.part")
        draft.write_text(json.dumps(self.run, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, file)

    def close(self) -> None:
        (self.folder / _LOCK).unlink(missing_ok=True)
        self._lock.close()


class _Lines:
    """One JSONL file: what it holds already, and appending to it.

    unit: the leading part of the key that is written in one go. When the last line is torn, the last unit goes with
    it, so that a unit is always computed whole and a resumed run gives what an undisturbed one gives.
    """

    def __init__(self, file: Path, key: tuple[str, ...], unit: tuple[str, ...]) -> None:
        self.file, self.key = file, key
        whole, torn = self._read()
        rows = [json.loads(line) for line in whole]
        if torn:
            last = [rows[-1].get(name) for name in unit] if rows else None
            while rows and [rows[-1].get(name) for name in unit] == last:
                rows.pop()
                whole.pop()
            file.write_bytes(b"".join(line + b"\n" for line in whole))
        self.done = {tuple(row.get(name) for name in key) for row in rows}

    def _read(self) -> tuple[list[bytes], bool]:
        if not self.file.exists():
            return [], False
        *lines, rest = self.file.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"{self.file}, line {number}: not JSON ({error}); delete the line and resume"
                ) from error
        return lines, bool(rest)

    def add(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        data = "".join(json.dumps(finite(row), ensure_ascii=False) + "\n" for row in rows).encode()
        # One unbuffered write: a killed process leaves all of it or, at worst, a torn last line.
        with open(self.file, "ab", buffering=0) as out:
            out.write(data)
        self.done |= {tuple(row[name] for name in self.key) for row in rows}


def _lock(folder: Path) -> Any:
    """Hold the directory while this process lives; where the system has no such locks, nobody is kept out."""
    handle = open(folder / _LOCK, "w")  # noqa: SIM115
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.close()
            raise InputError(
                f"another process is writing to '{folder}'; wait for it or choose another --out"
            ) from error
    return handle


@contextlib.contextmanager
def writing(folder: Path, run: Row, *, resume: bool) -> Iterator[ResultsWriter]:
    """A ResultsWriter that lets go of the directory in the end."""
    writer = ResultsWriter(folder, run, resume=resume)
    try:
        yield writer
    finally:
        writer.close()
