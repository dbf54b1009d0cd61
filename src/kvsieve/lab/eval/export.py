"""CSV export of every cell, in full precision."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from kvsieve.errors import KvsieveError
from kvsieve.lab.eval.aggregate import Cell, CostCell
from kvsieve.lab.eval.comparison import Compared
from kvsieve.lab.eval.intervals import MeanEstimate
from kvsieve.lab.eval.rows import Row, finite
from kvsieve.report.labels import FULL

_RUN = ("dtype", "seed", "haystack")
_CELL = ("n", "tasks", "score", "low", "high", "kl", "top1", "kl_last", "kv_share", "not_applied")
_DIFFERENCE = ("mean", "low", "high", "p", "n", "clusters", "different", "verdict")
_MEDIANS = ("ttft_s", "tpot_s", "tokens_per_s", "kv_bytes", "kv_read_bytes", "peak_bytes")
_RATIOS = ("ttft_s", "tpot_s", "kv_bytes")
COLUMNS = (
    *("model", "machine", *_RUN, "task", "length", "question", "method", "label", "budget", *_CELL),
    *(f"{prefix}_{name}" for prefix in ("less_full", "less_baseline") for name in _DIFFERENCE),
    *("repeats", *_MEDIANS, *(f"{name.removesuffix('_s')}_ratio" for name in _RATIOS)),
)


def rows_of(entries: Sequence[Compared]) -> list[Row]:
    """Return a row per cell and one per mean over tasks, with None for missing values."""
    return [_row(entry, cell) for entry in entries for cell in [*entry.cells, *entry.means]]


def _row(entry: Compared, cell: Cell) -> Row:
    place = cell.task, cell.length, cell.question, cell.label, cell.budget
    run = entry.subject.results.run
    row: Row = {"model": entry.subject.model, "machine": entry.subject.machine, **{name: run[name] for name in _RUN}}
    row |= {"task": cell.task, "length": cell.length, "question": cell.question, "method": cell.label.split()[0],
            "label": cell.label, "budget": cell.budget}  # fmt: skip
    row |= {name: getattr(cell, name) for name in _CELL}
    row |= _of_difference("less_full", entry.from_full.get(place))
    row |= _of_difference("less_baseline", entry.from_baseline.get(place))
    row |= _of_costs(entry.costs.get((cell.length, cell.label, cell.budget)))
    return finite(row)


def _of_difference(prefix: str, one: MeanEstimate | None) -> Row:
    data = {} if one is None else one.to_dict()
    return {f"{prefix}_{name}": data.get(name) for name in _DIFFERENCE}


def _of_costs(cost: CostCell | None) -> Row:
    if cost is None:
        return dict.fromkeys(("repeats", *_MEDIANS, *(f"{name.removesuffix('_s')}_ratio" for name in _RATIOS)))
    ratios = {f"{name.removesuffix('_s')}_ratio": cost.ratios.get(name) for name in _RATIOS}
    whole = dict.fromkeys(ratios, 1.0) if cost.label == FULL else ratios
    return {"repeats": cost.repeats, **{name: cost.median(name) for name in _MEDIANS}, **whole}


def write_csv(entries: Sequence[Compared], file: Path) -> None:
    """Write the rows. Raises KvsieveError if the file cannot be written."""
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, COLUMNS)
    writer.writeheader()
    writer.writerows(rows_of(entries))
    try:
        file.write_bytes(buffer.getvalue().encode("utf-8", "replace"))
    except OSError as error:
        raise KvsieveError(f"{file} cannot be written: {error.strerror or error}; give --csv another file") from error
