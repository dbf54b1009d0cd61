"""Tables of the report, as text, for HTML and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvsieve.lab.eval.aggregate import Cell, CostCell, budgets_of, cells, cost_cells, labels_of, task_means
from kvsieve.lab.eval.cells import COMPARED, parameter_values
from kvsieve.lab.eval.intervals import LEVEL, MeanEstimate
from kvsieve.lab.eval.results import Results
from kvsieve.lab.eval.rows import Row
from kvsieve.lab.eval.significance import Place
from kvsieve.report.labels import FULL, distinct
from kvsieve.report.tables import Entry, Table

DAGGER = "†"
NONE = "–"
_ARROWS = {"lower": " ↓", "higher": " ↑"}
_MIB = 2**20


@dataclass(frozen=True)
class Tables:
    """All tables of a report, longest prompts first.

    summary, fidelity, costs: one per length. tasks, metrics: one per length and question mode.
    """

    summary: list[Table]
    tasks: list[Table]
    fidelity: list[Table]
    costs: list[Table]
    metrics: list[Table]


def make_tables(
    results: Results, interval: Callable[[Cell], str], differences: Mapping[Place, MeanEstimate] | None = None
) -> Tables:
    """Return the tables of a results directory.

    Args:
        results: the directory's contents.
        interval: formats a task's 95% interval after its score.
        differences: from full KV; significant ones are marked.
    """

    def sign(cell: Cell) -> str:
        return arrow((differences or {}).get((cell.task, cell.length, cell.question, cell.label, cell.budget)))

    def behind(cell: Cell) -> str:
        return interval(cell) + sign(cell)

    parts = cells(results.samples)
    costs = cost_cells(results.costs)
    means = task_means(parts)
    lengths = sorted(distinct(cell.length for cell in parts), reverse=True)
    groups = [(length, question) for length in lengths for question in questions_of(parts, length)]
    return Tables(
        [_summary(means, length, sign) for length in lengths],
        [_per_task(_only(parts, *group), _only(means, *group), results.tasks, behind, *group) for group in groups],
        [_fidelity(means, length) for length in lengths],
        [_costs(costs, length) for length in sorted(distinct(cell.length for cell in costs), reverse=True)],
        [table for group in groups if (table := _metrics(_only(parts, *group), results.tasks, *group))],
    )


def settings_table(results: Results, baseline: str | None = None) -> list[Table]:
    """Return the table of parameters set by a model or paper, if there are any.

    Args:
        results: the directory's contents.
        baseline: label from which others should differ in method alone; default: the first method's.
    """
    settings: dict[str, list[Row]] = {}
    for setting in results.run.get("settings") or []:
        settings.setdefault(setting["label"], []).append(setting)
    columns = ("paper", *COMPARED)
    found = {
        label: [_values(own, name) for name in columns]
        for label, own in settings.items()
        if label != FULL and any(_values(own, name) != NONE for name in COMPARED)
    }
    if not found:
        return []
    chosen = baseline if baseline in found else next(iter(found))
    rows = [
        [Entry(label), *(Entry(own, NONE not in (own, usual) and own != usual)
                         for own, usual in zip(texts, found[chosen], strict=True))]
        for label, texts in found.items()
    ]  # fmt: skip
    note = f"Parameters that come with a model, with paper=True or from the caller. Bold: unlike {chosen}."
    return [Table("Settings", ["method", *columns], rows, 1, note)]


def _values(settings: Sequence[Row], name: str) -> str:
    """Return the values of a parameter, or of a wrapper's base, at all budgets."""
    if name == "paper":
        return "yes" if any(setting.get("paper") for setting in settings) else "no"
    return ", ".join(parameter_values((setting["parameters"] for setting in settings), name)) or NONE


def plus_minus(cell: Cell) -> str:
    return f" ± {100 * cell.half:.1f}"


def bounds(cell: Cell) -> str:
    return f" [{100 * cell.low:.0f}–{100 * cell.high:.0f}]"


def budget_name(budget: str | None) -> str:
    return budget or "all"


def _only(parts: Sequence[Cell], length: int, question: str) -> list[Cell]:
    return [cell for cell in parts if (cell.length, cell.question) == (length, question)]


def questions_of(parts: Sequence[Cell], length: int) -> list[str]:
    return sorted(distinct(cell.question for cell in parts if cell.length == length), key=lambda q: q != "visible")


def runs(parts: Sequence[Cell] | Sequence[CostCell]) -> list[tuple[str, str | None]]:
    """Return labels and budgets in the order of tables."""
    known = {(cell.label, cell.budget) for cell in parts}
    labels = labels_of({"label": cell.label} for cell in parts)
    return [(label, budget) for label in labels for budget in budgets_of(parts) if (label, budget) in known]


def _summary(means: Sequence[Cell], length: int, sign: Callable[[Cell], str]) -> Table:
    """Rows are methods; a column per budget and question mode."""
    group = [cell for cell in means if cell.length == length]
    columns = [(budget, question) for budget in budgets_of(group) for question in questions_of(group, length)]
    by_place = {(cell.label, cell.budget, cell.question): cell for cell in group}
    most = {question: max(c.tasks for c in group if c.question == question) for question in questions_of(group, length)}
    # A mean over fewer tasks is no match for the others.
    best = {
        column: max(
            (
                c.score
                for c in group
                if (c.budget, c.question) == column and c.label != FULL and c.tasks == most[c.question]
            ),
            default=None,
        )
        for column in columns
    }
    rows = []
    for label in labels_of({"label": cell.label} for cell in group):
        row = [Entry(label)]
        for column in columns:
            cell = by_place.get((label, *column))
            row.append(Entry(NONE) if cell is None else _mean_entry(cell, most[cell.question], best[column], sign))
        rows.append(row)
    headers = ["method", *(f"{budget_name(budget)}, {question}" for budget, question in columns)]
    counts = " and ".join(f"{count} ({question})" for question, count in most.items())
    note = (f"Mean score over tasks in percent, ± half the 95% interval. Columns: budget and question mode; "
            f"“all” keeps the whole cache. Tasks: {counts}. Bold: best of its column, full KV aside.")  # fmt: skip
    return Table(f"Mean over tasks: {length} tokens", headers, rows, 1, note + _explained(rows))


def _explained(rows: Sequence[Sequence[Entry]]) -> str:
    """Return explanations of the signs in a table."""
    texts = "".join(entry.text for row in rows for entry in row)
    note = ""
    if any(arrow in texts for arrow in _ARROWS.values()):
        note += f" ↓, ↑: lower, higher than full KV on the same samples (sign-flip test, p<{LEVEL})."
    if DAGGER in texts:
        note += f" {DAGGER}: the method did not run as asked in some samples."
    return note


def arrow(difference: MeanEstimate | None) -> str:
    return "" if difference is None else _ARROWS.get(difference.verdict, "")


def _mean_entry(cell: Cell, most: int, best: float | None, sign: Callable[[Cell], str]) -> Entry:
    text = f"{100 * cell.score:.1f}{plus_minus(cell)}{sign(cell)}"
    if cell.tasks < most:
        return Entry(f"{text} ({cell.tasks} of {most} tasks)" + DAGGER * bool(cell.not_applied))
    return Entry(
        text + DAGGER * bool(cell.not_applied), cell.label != FULL and best is not None and cell.score > best - 1e-9
    )


def _per_task(
    parts: Sequence[Cell],
    means: Sequence[Cell],
    titles: dict[str, str],
    interval: Callable[[Cell], str],
    length: int,
    question: str,
) -> Table:
    tasks = [task for task in titles if any(cell.task == task for cell in parts)]
    by_place = {(cell.label, cell.budget, cell.task): cell for cell in [*parts, *means]}
    rows = []
    for run in runs(parts):
        row = [Entry(run[0]), Entry(budget_name(run[1]))]
        for task in [*tasks, "mean"]:
            cell = by_place.get((*run, task))
            text = NONE if cell is None else f"{100 * cell.score:.1f}{interval(cell)}{DAGGER * bool(cell.not_applied)}"
            row.append(Entry(text))
        rows.append(row)
    counts = sorted({cell.n for cell in parts})
    samples = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    note = f"Score in percent with its 95% interval; {samples} samples per task."
    headers = ["method", "budget", *(titles[task] for task in tasks), "mean"]
    return Table(f"Scores: {length} tokens, question {question}", headers, rows, 2, note + _explained(rows))


def _fidelity(means: Sequence[Cell], length: int) -> Table:
    group = [cell for cell in means if cell.length == length]
    questions = questions_of(group, length)
    by_place = {(cell.label, cell.budget, cell.question): cell for cell in group}
    headers = ["method", "budget"]
    rows = []
    for question in questions:
        headers += [f"KL, {question}", f"KL at the last prompt token, {question}", f"same top-1 %, {question}",
                    f"KV kept %, {question}"]  # fmt: skip
    for run in runs(group):
        row = [Entry(run[0]), Entry(budget_name(run[1]))]
        for question in questions:
            cell = by_place.get((*run, question))
            values = ("kl", 1, "{:.4f}"), ("kl_last", 1, "{:.4f}"), ("top1", 100, "{:.1f}"), ("kv_share", 100, "{:.1f}")
            row += [Entry(number(getattr(cell, name, None), scale, form)) for name, scale, form in values]
        rows.append(row)
    return Table(f"Distance to full KV: {length} tokens", headers, rows, 2, "Means over tasks; KL in nats.")


def number(value: float | None, scale: float = 1.0, form: str = "{:.2f}") -> str:
    return NONE if value is None else form.format(scale * value)


def _costs(costs: Sequence[CostCell], length: int) -> Table:
    group = [cell for cell in costs if cell.length == length]
    by_run = {(cell.label, cell.budget): cell for cell in group}
    columns = (("TTFT s", "ttft_s", 1.0), ("TPOT ms", "tpot_s", 1e3), ("tokens/s", "tokens_per_s", 1.0),
               ("KV MiB", "kv_bytes", 1 / _MIB), ("KV read MiB/token", "kv_read_bytes", 1 / _MIB),
               ("peak MiB", "peak_bytes", 1 / _MIB), ("deep tokens", "deep_tokens", 1.0))  # fmt: skip
    headers = ["method", "budget", *(name for name, _, _ in columns), "TTFT p95 / p99 s", "TPOT p95 / p99 ms"]
    rows = []
    for run in runs(group):
        cell = by_run[run]
        row = [Entry(run[0]), Entry(budget_name(run[1]))]
        row += [Entry(_with_ratio(cell, quantity, scale)) for _, quantity, scale in columns]
        row += [Entry(_tail(cell, "ttft_s", 1.0)), Entry(_tail(cell, "tpot_s", 1e3))]
        rows.append(row)
    repeats = sorted({cell.repeats for cell in group})
    count = " to ".join(str(count) for count in distinct([repeats[0], repeats[-1]]))
    note = (f"Medians, and in brackets the median ratio to full KV of the same repeat. Repeats: {count}; "
            f"{group[0].new_tokens} new tokens.")  # fmt: skip
    return Table(f"Costs: {length} tokens", headers, rows, 2, note)


def _with_ratio(cell: CostCell, quantity: str, scale: float) -> str:
    value = cell.median(quantity)
    ratio = cell.ratios.get(quantity)
    if value is None:
        return NONE
    text = significant(scale * value)
    return text if ratio is None or cell.label == FULL else f"{text} ({ratio:.2f}×)"


def _tail(cell: CostCell, quantity: str, scale: float) -> str:
    spread = cell.spreads.get(quantity)
    return NONE if spread is None else f"{significant(scale * spread.p95)} / {significant(scale * spread.p99)}"


def significant(value: float) -> str:
    """Return three digits, without an exponent."""
    return f"{value:.{sum(value < least for least in (100, 10, 1))}f}"


def _metrics(parts: Sequence[Cell], titles: dict[str, str], length: int, question: str) -> Table | None:
    columns = distinct(
        (cell.task, name) for task in titles for cell in parts if cell.task == task for name in cell.metrics
    )
    if not columns:
        return None
    by_place = {(cell.label, cell.budget, cell.task): cell for cell in parts}
    rows = []
    for run in runs(parts):
        found = [by_place.get((*run, task)) for task, _ in columns]
        values = [c.metrics.get(name) if c else None for c, (_, name) in zip(found, columns, strict=True)]
        rows.append([Entry(run[0]), Entry(budget_name(run[1])), *(Entry(number(v, 100, "{:.1f}")) for v in values)])
    headers = ["method", "budget", *(f"{titles[task]}: {name}" for task, name in columns)]
    return Table(f"Other metrics: {length} tokens, question {question}", headers, rows, 2, "Means in percent.")
