"""A results directory, as `kvsieve eval` writes it: reading it, and bringing many samples down to a few numbers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvsieve.errors import InputError, short

FORMAT = 1
FULL = "full"
_Z95 = 1.959963984540054
_NUMBER = (int, float)
SAMPLE_FIELDS: dict[str, Any] = {
    "task": str,
    "length": int,
    "question": str,
    "sample": int,
    "label": str,
    "budget": (str, type(None)),
    "score": _NUMBER,
}
COST_FIELDS: dict[str, Any] = {
    "length": int,
    "label": str,
    "budget": (str, type(None)),
    "repeat": int,
    "env": int,
    "new_tokens": int,
    "ttft_s": _NUMBER,
    "token_s": list,
}
_RUN_FIELDS: dict[str, Any] = {
    "model": str,
    "dtype": str,
    "seed": int,
    "haystack": str,
    "tasks": dict,
    "environments": list,
    "seconds": _NUMBER,
}
_SETTING_FIELDS: dict[str, Any] = {"label": str, "budget": (str, type(None)), "parameters": dict}
SAMPLE_KEY = ("task", "length", "question", "sample", "label", "budget")
_COST_KEY = ("env", "length", "label", "budget", "repeat")

# How a row ends that carries its checksum.
_SEAL = re.compile(rb', "checksum": "([0-9a-f]{16})"\}\Z')

Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """What a results directory holds."""

    folder: Path
    run: Row
    samples: list[Row]
    costs: list[Row]

    @property
    def labels(self) -> list[str]:
        return labels_of([*self.samples, *self.costs])

    @property
    def tasks(self) -> dict[str, str]:
        """Names and titles of the tasks that have samples, in the order of the run."""
        titles = self.run.get("tasks") or {}
        seen = distinct(row["task"] for row in self.samples)
        return {name: str(titles.get(name) or name) for name in [*(n for n in titles if n in seen), *seen]}


@dataclass(frozen=True)
class Cell:
    """Samples of one task, length, question mode, label and budget, or of several tasks: then `task` is "mean".

    low, high: 95% Wilson interval of `score`. n: samples. tasks: how many tasks are in it. not_applied: samples in
    which the method did not run as asked.
    """

    task: str
    length: int
    question: str
    label: str
    budget: str | None
    n: int
    score: float
    low: float
    high: float
    metrics: dict[str, float] = field(default_factory=dict)
    kl: float | None = None
    top1: float | None = None
    kl_last: float | None = None
    kv_share: float | None = None
    not_applied: int = 0
    tasks: int = 1

    @property
    def half(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2

    def to_dict(self) -> Row:
        return {key: finite(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Spread:
    """A measured quantity over repeats (over single tokens for tpot_s)."""

    median: float
    mean: float
    p95: float
    p99: float


@dataclass(frozen=True)
class CostCell:
    """Costs of one length, label and budget.

    repeats: how many runs. spreads: quantity -> its spread. ratios: quantity -> median over repeats of (this / full
    of the same repeat and invocation). kept: share of the prompt's tokens kept, [layers][bins], or None.
    """

    length: int
    label: str
    budget: str | None
    repeats: int
    new_tokens: int
    spreads: dict[str, Spread]
    ratios: dict[str, float]
    kept: list[list[float]] | None = None

    def median(self, quantity: str) -> float | None:
        spread = self.spreads.get(quantity)
        return None if spread is None else spread.median

    def to_dict(self) -> Row:
        """JSON-ready, without the map of kept tokens, which is large."""
        return {key: finite(value) for key, value in asdict(self).items() if key != "kept"}


def load(folder: str | Path) -> Results:
    """Read and check a results directory. Raises InputError."""
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
    """What run.json says, checked; None where there is none. Raises InputError."""
    data = _data(file)
    if data is None:
        return None
    try:
        run = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}); run `kvsieve eval --out` into a new directory") from error
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        got = run.get("format") if isinstance(run, dict) else type(run).__name__
        raise InputError(f"{file}: expected format {FORMAT}, got {short(got)}; use the kvsieve that wrote it")
    problem = _problem(run, _RUN_FIELDS) or _problem_within(run)
    if problem:
        raise InputError(f"{file}: {problem}; mend it, or run `kvsieve eval --out` into a new directory")
    return run


def _problem_within(run: Row) -> str | None:
    if not 0 <= run["seconds"] < 1e12:
        return f"'seconds' is {short(run['seconds'])}, expected wall time"
    for name, title in run["tasks"].items():
        if not isinstance(title, str):
            return f"the task {short(name)} has the title {short(title)}, expected text"
    for number, each in enumerate(run["environments"]):
        if not isinstance(each, dict):
            return f"environment {number} is {short(each)}, expected an object"
    settings = run.get("settings", [])
    if not isinstance(settings, list):
        return f"'settings' is {short(settings)}, expected a list"
    for number, each in enumerate(settings):
        problem = _problem(each, _SETTING_FIELDS)
        if problem:
            return f"setting {number}: {problem}"
    return None


def sealed(row: Row) -> bytes:
    """A row as a line of a file, with a checksum of it at its end."""
    # A model's answer may hold half a character.
    text = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return text[:-1] + f', "checksum": "{_checksum(text)}"}}\n'.encode()


def unsealed(line: bytes, fields: Mapping[str, Any]) -> Row:
    """The row of a line, which has at least `fields`. Raises ValueError for another, and for one that was changed.

    Rows without a checksum, as older versions wrote them, are taken as they are.
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
    problem = _problem(row, fields)
    if problem:
        raise ValueError(problem)
    return row


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _data(file: Path) -> bytes | None:
    """What is in a file; None where there is none."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error


def _read_lines(file: Path, fields: Mapping[str, Any]) -> list[Row]:
    *lines, rest = (_data(file) or b"").split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(unsealed(line, fields))
        except ValueError as error:
            raise InputError(f"{file}, line {number}: {error}; delete the line and run again") from error
    # Whoever wrote a line that does not end may have been killed half-way.
    with contextlib.suppress(ValueError):
        rows.append(unsealed(rest, fields))
    for row in rows:
        row.pop("more", None)
    return rows


def _problem(row: Any, fields: Mapping[str, Any]) -> str | None:
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
    names = {int: "an integer", str: "text", list: "a list", dict: "an object", _NUMBER: "a number"}
    return names.get(kind, "text or null")


def _unique(rows: Iterable[Row], key: Sequence[str]) -> list[Row]:
    """The first of each key: a run that was resumed may have written one twice."""
    return list(_groups(rows, key, first_only=True).values())


def _groups(rows: Iterable[Row], key: Sequence[str], first_only: bool = False) -> dict[tuple[Any, ...], Any]:
    found: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        name = tuple(row[part] for part in key)
        if first_only:
            found.setdefault(name, row)
        else:
            found.setdefault(name, []).append(row)
    return found


def wilson(mean: float, n: int) -> tuple[float, float]:
    """95% interval of a share seen in n samples; for scores between 0 and 1 it is wider than it need be."""
    square = _Z95**2 / n
    centre = (mean + square / 2) / (1 + square)
    half = _Z95 * math.sqrt(max(mean * (1 - mean), 0.0) / n + square / (4 * n)) / (1 + square)
    # At 0 and 1 the bound is exact; only rounding moves it past the mean.
    return max(0.0, min(centre - half, mean)), min(1.0, max(centre + half, mean))


def cells(samples: Iterable[Row]) -> list[Cell]:
    """One cell per task, length, question mode, label and budget."""
    groups = _groups(samples, ("task", "length", "question", "label", "budget"))
    return [_cell(key, rows) for key, rows in groups.items()]


def _cell(key: tuple[Any, ...], rows: list[Row]) -> Cell:
    score = sum(row["score"] for row in rows) / len(rows)
    names = distinct(name for row in rows for name in row.get("metrics") or {} if name != "score")
    metrics = {name: mean_of((row.get("metrics") or {}).get(name) for row in rows) for name in names}
    return Cell(
        *key,
        len(rows),
        score,
        *wilson(score, len(rows)),
        metrics={name: value for name, value in metrics.items() if value is not None},
        **{name: mean_of(row.get(name) for row in rows) for name in ("kl", "top1", "kl_last", "kv_share")},
        not_applied=sum(row.get("applied") is False for row in rows),
    )


def task_means(parts: Iterable[Cell]) -> list[Cell]:
    """Over tasks, each of the same weight: one cell per length, question mode, label and budget.

    The interval is Wilson's for all samples together.
    """
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in parts:
        groups.setdefault((cell.length, cell.question, cell.label, cell.budget), []).append(cell)
    return [_task_mean(key, group) for key, group in groups.items()]


def _task_mean(key: tuple[Any, ...], group: list[Cell]) -> Cell:
    score, n = sum(cell.score for cell in group) / len(group), sum(cell.n for cell in group)
    return Cell(
        "mean",
        *key,
        n,
        score,
        *wilson(score, n),
        **{name: mean_of(getattr(cell, name) for cell in group) for name in ("kl", "top1", "kl_last", "kv_share")},
        not_applied=sum(cell.not_applied for cell in group),
        tasks=len(group),
    )


_QUANTITIES: dict[str, Callable[[Row], float | None]] = {
    "ttft_s": lambda row: row["ttft_s"],
    "tpot_s": lambda row: float(np.median(row["token_s"])) if row["token_s"] else row.get("tpot_s"),
    "total_s": lambda row: row["ttft_s"] + sum(row["token_s"]),
    "tokens_per_s": lambda row: row["new_tokens"] / (row["ttft_s"] + sum(row["token_s"])),
    "kv_bytes": lambda row: row.get("kv_bytes"),
    "kv_read_bytes": lambda row: row.get("kv_read_bytes"),
    "peak_bytes": lambda row: row.get("peak_bytes"),
    "deep_tokens": lambda row: row.get("deep_tokens"),
}


def cost_cells(costs: Iterable[Row]) -> list[CostCell]:
    """One cell per length, label and budget."""
    costs = list(costs)
    full = {_occasion(row): row for row in costs if row["label"] == FULL}
    groups = _groups(costs, ("length", "label", "budget"))
    return [_cost_cell(key, rows, full) for key, rows in groups.items()]


def _cost_cell(key: tuple[Any, ...], rows: list[Row], full: Mapping[tuple[Any, ...], Row]) -> CostCell:
    spreads, ratios = {}, {}
    for name, quantity in _QUANTITIES.items():
        values = [quantity(row) for row in rows]
        if name == "tpot_s":
            single = [seconds for row in rows for seconds in row["token_s"]]
            values = single or values
        values = [value for value in values if value is not None]
        if values:
            p95, p99 = np.percentile(values, [95, 99])
            spreads[name] = Spread(float(np.median(values)), float(np.mean(values)), float(p95), float(p99))
        pairs = [(quantity(row), quantity(full[_occasion(row)])) for row in rows if _occasion(row) in full]
        shares = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
        if shares:
            ratios[name] = float(np.median(shares))
    return CostCell(*key, len(rows), rows[0]["new_tokens"], spreads, ratios, kept=rows[0].get("kept") or None)


def _occasion(row: Row) -> tuple[Any, ...]:
    """Rows that were measured on the same prompt in the same invocation."""
    return row["env"], row["length"], row["repeat"]


def mean_of(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None of none."""
    present = [value for value in values if value is not None and not math.isnan(value)]
    return sum(present) / len(present) if present else None


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON cannot write."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def labels_of(rows: Iterable[Row]) -> list[str]:
    """Full first, then as first seen."""
    return sorted(distinct(row["label"] for row in rows), key=lambda label: label != FULL)


def budgets_of(items: Iterable[Cell | CostCell]) -> list[str | None]:
    """None (no budget) first, then shares, then numbers of entries, each from small to large."""
    return sorted(distinct(item.budget for item in items), key=budget_order)


def budget_order(budget: str | None) -> tuple[int, float, str]:
    if budget is None:
        return (0, 0.0, "")
    try:
        return (1, float(budget[:-1]), "") if budget.endswith("%") else (2, float(budget), "")
    except ValueError:
        return (3, 0.0, budget)
