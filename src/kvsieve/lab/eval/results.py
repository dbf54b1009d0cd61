"""Reader of results directories, with checks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError, short
from kvsieve.lab.eval.aggregate import labels_of
from kvsieve.lab.eval.rows import (
    COST_FIELDS,
    NUMBER,
    SAMPLE_FIELDS,
    SAMPLE_KEY,
    Row,
    contents,
    groups,
    how_to_mend,
    read_bytes,
    row_problem,
    unsealed,
)
from kvsieve.report.labels import distinct

FORMAT = 1
_COST_KEY = ("env", "length", "label", "budget", "repeat")
_RUN_FIELDS: dict[str, Any] = {
    "model": str,
    "dtype": str,
    "seed": int,
    "haystack": str,
    "tasks": dict,
    "environments": list,
    "seconds": NUMBER,
}
_SETTING_FIELDS: dict[str, Any] = {"label": str, "budget": (str, type(None)), "parameters": dict}


@dataclass(frozen=True)
class Results:
    """Contents of a results directory."""

    folder: Path
    run: Row
    samples: list[Row]
    costs: list[Row]

    @property
    def labels(self) -> list[str]:
        return labels_of([*self.samples, *self.costs])

    @property
    def tasks(self) -> dict[str, str]:
        """Return names and titles of the tasks with samples, in the order of the run."""
        titles = self.run.get("tasks") or {}
        seen = distinct(row["task"] for row in self.samples)
        return {name: str(titles.get(name) or name) for name in [*(n for n in titles if n in seen), *seen]}


def load(folder: str | Path) -> Results:
    """Return a checked results directory. Raises InputError."""
    folder = Path(folder)
    run = read_run(folder / "run.json")
    if run is None:
        what = "has no run.json" if folder.is_dir() else "is not a directory"
        raise InputError(f"no results at '{folder}': it {what}; run `kvsieve eval --out {folder}` first")
    samples = _unique(_read_lines(folder / "samples.jsonl", SAMPLE_FIELDS), SAMPLE_KEY)
    costs = _unique(_read_lines(folder / "costs.jsonl", COST_FIELDS), _COST_KEY)
    if not samples and not costs:
        raise InputError(f"'{folder}' has no finished sample yet; run `kvsieve eval --out {folder}` to the end")
    return Results(folder, run, samples, costs)


def read_run(file: Path) -> Row | None:
    """Return the checked contents of run.json, or None if it is missing. Raises InputError."""
    data = read_bytes(file)
    if data is None:
        return None
    try:
        run = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}); run `kvsieve eval --out` into a new directory") from error
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        got = run.get("format") if isinstance(run, dict) else type(run).__name__
        raise InputError(f"{file}: expected format {FORMAT}, got {short(got)}; use the kvsieve that wrote it")
    problem = row_problem(run, _RUN_FIELDS) or _problem_within(run)
    if problem:
        raise InputError(f"{file}: {problem}; mend it, or run `kvsieve eval --out` into a new directory")
    return run


def _problem_within(run: Row) -> str | None:
    if not 0 <= run["seconds"] < 1e12:
        return f"'seconds' is {short(run['seconds'])}, expected wall time"
    for name, title in run["tasks"].items():
        if not isinstance(title, str):
            return f"the task {short(name)} has the title {short(title)}, expected text"
    for number, environment in enumerate(run["environments"]):
        if not isinstance(environment, dict):
            return f"environment {number} is {short(environment)}, expected an object"
    if not isinstance(run.get("data", {}), dict):
        return f"'data' is {short(run['data'])}, expected an object"
    settings = run.get("settings", [])
    if not isinstance(settings, list):
        return f"'settings' is {short(settings)}, expected a list"
    for number, setting in enumerate(settings):
        problem = row_problem(setting, _SETTING_FIELDS)
        if problem:
            return f"setting {number}: {problem}"
    return None


def _read_lines(file: Path, fields: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for part, data in contents(file):
        *lines, rest = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                rows.append(unsealed(line, fields))
            except ValueError as error:
                raise InputError(f"{part}, line {number}: {error}; {how_to_mend(part)} and run again") from error
        # An unterminated line may be from a killed process.
        with contextlib.suppress(ValueError):
            rows.append(unsealed(rest, fields))
    for row in rows:
        row.pop("more", None)
    return rows


def _unique(rows: Iterable[Row], key: Sequence[str]) -> list[Row]:
    """Return the first row of each key: an interrupted run may have written duplicates."""
    return list(groups(rows, key, first_only=True).values())
