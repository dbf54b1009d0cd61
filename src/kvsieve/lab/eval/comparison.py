"""Tables that compare settings with full KV and a baseline, for one or more models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvsieve.errors import InputError
from kvsieve.lab.eval.aggregate import Cell, CostCell, cells, cost_cells, task_means
from kvsieve.lab.eval.intervals import FEWEST, FEWEST_DIFFERENT, LEVEL, MeanEstimate
from kvsieve.lab.eval.merge import Subject
from kvsieve.lab.eval.significance import Place, against, against_full
from kvsieve.lab.eval.tables import NONE, budget_name, number, plus_minus, questions_of, runs
from kvsieve.report.labels import FULL, distinct
from kvsieve.report.tables import Entry, Table

METHOD_NOTE = (
    "Differences are of the same samples, with 95% intervals: Tango's score interval where scores are 0 or 1, else "
    "Student's t, over documents where several samples share one; tasks weigh the same in the mean. “Lower” and "
    f"“higher”: 0 is outside, and a sign-flip test has p<{LEVEL}. “Level” does not mean that there is no "
    f"difference: look at the interval. With fewer than {FEWEST} samples, or fewer than {FEWEST_DIFFERENT} samples or "
    "documents that differ, no difference is claimed. Of twenty rows that are level in truth, one is marked by chance."
)


@dataclass(frozen=True)
class Compared:
    """One subject with all its figures.

    Attributes:
        subject: owner of the rows.
        baseline: label to compare settings with at equal budgets; None for full KV alone.
    """

    subject: Subject
    baseline: str | None = None

    @cached_property
    def cells(self) -> list[Cell]:
        return cells(self.subject.results.samples)

    @cached_property
    def means(self) -> list[Cell]:
        return task_means(self.cells)

    @cached_property
    def costs(self) -> dict[tuple[int, str, str | None], CostCell]:
        return {(cell.length, cell.label, cell.budget): cell for cell in cost_cells(self.subject.results.costs)}

    @cached_property
    def from_full(self) -> dict[Place, MeanEstimate]:
        return against_full(self.subject.results.samples)

    @cached_property
    def from_baseline(self) -> dict[Place, MeanEstimate]:
        return {} if self.baseline is None else against(self.subject.results.samples, self.baseline)


def compared(subjects: Sequence[Subject], baseline: str | None = None) -> list[Compared]:
    """Return the subjects, each with its label of `baseline`.

    Args:
        subjects: at least one.
        baseline: a label, or a method that has one label.

    Raises:
        InputError: no subject has the baseline, or one has it under several labels.
    """
    if baseline is None:
        return [Compared(subject) for subject in subjects]
    found = [Compared(subject, _label(subject, baseline)) for subject in subjects]
    if all(entry.baseline is None for entry in found):
        labels = distinct(label for subject in subjects for label in subject.results.labels if label != FULL)
        raise InputError(f"--baseline {baseline!r} was not evaluated; name one of {', '.join(map(repr, labels))}")
    return found


def _label(subject: Subject, baseline: str) -> str | None:
    labels = [label for label in subject.results.labels if label != FULL]
    if baseline in labels:
        return baseline
    fitting = [label for label in labels if label.split()[0] == baseline]
    if len(fitting) > 1:
        raise InputError(f"--baseline {baseline!r} stands for several in {subject.name}: name one of "
                         f"{', '.join(map(repr, fitting))}")  # fmt: skip
    return fitting[0] if fitting else None


def comparison_tables(entries: Sequence[Compared]) -> list[Table]:
    """Return a table per length and question mode: score, differences, distance, and cost ratios to full KV."""
    lengths = sorted(distinct(cell.length for entry in entries for cell in entry.means), reverse=True)
    return [
        _comparison(entries, length, question)
        for length in lengths
        for question in questions_of([cell for entry in entries for cell in entry.means], length)
    ]


def _comparison(entries: Sequence[Compared], length: int, question: str) -> Table:
    several = len(entries) > 1
    with_baseline = any(entry.baseline for entry in entries)
    costs = any(place[0] == length for entry in entries for place in entry.costs)
    headers = ["model"] * several + ["method", "budget", "tasks", "samples", "score", "less full", "against full"]
    headers += ["less baseline", "against baseline"] * with_baseline + ["KL", "KV kept %"]
    headers += ["KV MiB", "TTFT", "TPOT"] * costs
    rows = []
    for entry in entries:
        by_run = {(cell.label, cell.budget): cell for cell in entry.means
                if (cell.length, cell.question) == (length, question)}  # fmt: skip
        for run in runs(list(by_run.values())):
            row = [entry.subject.name] * several + [run[0], budget_name(run[1]), *_score(by_run[run])]
            row += _difference(entry.from_full, by_run[run])
            row += _difference(entry.from_baseline, by_run[run]) if with_baseline else []
            row += [number(by_run[run].kl, 1, "{:.4f}"), number(by_run[run].kv_share, 100, "{:.1f}")]
            row += _costs(entry.costs.get((length, *run))) if costs else []
            rows.append([Entry(text) for text in row])
    names = distinct(entry.baseline for entry in entries if entry.baseline)
    note = "Means over tasks; score in percent with ± half its 95% interval, differences in points."
    note += f" Baseline: {', '.join(names)} at the same budget." if names else ""
    note += " TTFT and TPOT: median ratio to full KV of the same repeat." if costs else ""
    return Table(f"Against full KV: {length} tokens, question {question}", headers, rows, 2 + several, note)


def _score(cell: Cell) -> list[str]:
    return [str(cell.tasks), str(cell.n), f"{100 * cell.score:.1f}{plus_minus(cell)}"]


def _difference(found: dict[Place, MeanEstimate], cell: Cell) -> list[str]:
    one = found.get((cell.task, cell.length, cell.question, cell.label, cell.budget))
    if one is None:
        return [NONE, NONE]
    return [f"{100 * one.mean:+.1f} [{100 * one.low:+.1f}, {100 * one.high:+.1f}]", verdict_text(one)]


def verdict_text(one: MeanEstimate) -> str:
    """Return the verdict in words."""
    if one.verdict == "few":
        return "too few samples" if one.n < FEWEST or one.clusters < FEWEST_DIFFERENT else "too few differ"
    return "level" if one.verdict == "level" else f"{one.verdict} ({one.chance})"


def _costs(cost: CostCell | None) -> list[str]:
    if cost is None:
        return [NONE] * 3
    memory = cost.median("kv_bytes")
    ratios = [cost.ratios.get(name) if cost.label != FULL else 1.0 for name in ("ttft_s", "tpot_s")]
    return [number(memory, 2**-20, "{:.1f}"), *(NONE if ratio is None else f"{ratio:.2f}×" for ratio in ratios)]
