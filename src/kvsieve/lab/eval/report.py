"""Report of a results directory: a self-contained HTML file, pictures, and Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvsieve.errors import InputError
from kvsieve.lab.eval.comparison import METHOD_NOTE, Compared, comparison_tables
from kvsieve.lab.eval.pictures import draw
from kvsieve.lab.eval.results import Results
from kvsieve.lab.eval.rows import Row, cut_documents
from kvsieve.lab.eval.tables import Tables, bounds, budget_name, make_tables, plus_minus, settings_table
from kvsieve.report import html as h
from kvsieve.report.labels import FULL, distinct
from kvsieve.report.pictures import Picture
from kvsieve.report.tables import Table, markdown_table
from kvsieve.text import Markdown, markdown_text

FORMATS = ("png", "svg")
DIFFERENCES = "Differences to full KV"
_ANSWER_LENGTH = 300
_GUIDE = (
    "Each method reads the same prompts as full KV, under a budget of KV entries per layer and head; “visible” means "
    "that it could see the question when it chose what to keep, “hidden” that the question came afterwards. "
    "Look at the summary for what an answer's quality costs at each budget, then at the intervals before you believe "
    "a difference: where they overlap widely, there are too few samples to tell."
)
GLOSSARY = (
    ("score", "What a task's scoring gives an answer, 0 to 100%; the mean over tasks gives each the same weight."),
    ("95% interval", "Clopper and Pearson's for a share seen in n samples, over documents where several samples "
     "share one; for a mean over tasks, those of the tasks put together."),
    ("±", "Half the width of the 95% interval, which is not quite symmetric around the score."),
    ("budget", "KV entries kept per layer and KV head: a share of the prompt, or a number; all: no budget."),
    ("KV kept", "Entries stored per KV head once the prompt was complete, mean over layers, as a share of the prompt."),
    ("KL", "Kullback-Leibler divergence of the next-token distribution from full KV's, mean over the tokens of full "
     "KV's answer, in nats; 0 is the same distribution."),
    ("KL at the last prompt token", "The same for the distribution of the answer's first token."),
    ("same top-1", "Share of those tokens for which the most likely token is full KV's."),
    ("TTFT", "Time to first token: from the start of the prefill to the first token of the answer."),
    ("TPOT", "Time per output token after the first."),
    ("p95, p99", "95 or 99 of 100 measured values were at most this: repeats for TTFT, single tokens for TPOT."),
    ("tokens/s", "New tokens divided by the time of the whole answer, prefill included."),
    ("KV MiB", "Memory that the stored KV entries take once the prompt was complete."),
    ("KV read MiB/token", "KV bytes that attention reads for each decoded token."),
    ("peak MiB", "Most memory in use during the run, where the device can tell."),
    ("deep tokens", "Prompt tokens that the last layers computed; fewer than the prompt with prefill reduction."),
    ("less full", "Mean over tasks of the score's difference to full KV on the same samples, in points, with its 95% "
     "interval."),
    ("against full", "lower or higher: 0 is outside the interval and p is below 0.05; level: not both; too "
     "few samples, too few differ: nothing is claimed."),
    ("×", "Ratio to full KV of the same repeat, the median of the repeats; below 1 is less."),
    ("full", "The model as it is: the whole cache, no method."),
)  # fmt: skip


def write_report(entry: Compared, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write report.html, tables.md and plots/ into the directory of one run; return the files.

    Raises InputError for an unknown format, KvsieveError if matplotlib is missing.
    """
    check_formats(formats)
    results = entry.subject.results
    pictures = draw(results, png="png" in formats)
    return write_all(results.folder, html_report(entry, pictures), markdown_report(entry), pictures, formats)


def check_formats(formats: Sequence[str]) -> None:
    """Raise InputError for an unknown format."""
    unknown = [form for form in formats if form not in FORMATS]
    if unknown or not formats:
        raise InputError(f"--formats must name some of {', '.join(FORMATS)}, got {', '.join(unknown) or 'nothing'}")


def write_all(folder: Path, page: str, tables: str, pictures: Sequence[Picture], formats: Sequence[str]) -> list[Path]:
    """Write a report's files. Returns them, the page and the tables first."""
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    written = [_write(folder / "report.html", page), _write(folder / "tables.md", tables)]
    for picture in pictures:
        for kind, content in (("png", picture.png), ("svg", picture.svg)):
            if kind in formats and content is not None:
                file = folder / "plots" / f"{picture.name}.{kind}"
                file.write_bytes(content)
                written.append(file)
    return written


def _write(file: Path, content: str) -> Path:
    # A model's answer may hold half a character, which UTF-8 cannot write.
    file.write_bytes(content.encode("utf-8", "replace"))
    return file


def markdown_report(entry: Compared) -> str:
    """Return tables for papers: percent with ± half of the 95% interval."""
    results = entry.subject.results
    tables = make_tables(results, plus_minus, entry.from_full)
    groups = (("Summary", tables.summary), ("Settings", settings_table(results, entry.baseline)),
              (DIFFERENCES, _differences(entry)), ("Scores per task", tables.tasks),
              ("Distance to full KV", tables.fidelity), ("Costs", tables.costs))  # fmt: skip
    return markdown_tables(_title(results), groups, [f"{text}." for text in cut_documents(results.samples)])


def markdown_tables(title: str, groups: Iterable[tuple[str, Sequence[Table]]], notes: Sequence[str] = ()) -> str:
    """Render grouped tables as Markdown, notes first; empty groups are skipped."""
    parts = [f"# {markdown_text(title)}", *map(markdown_text, notes)]
    for title, found in groups:
        parts += [f"## {title}"] * bool(found)
        parts += [METHOD_NOTE] * (title == DIFFERENCES and bool(found))
        for table in found:
            parts += [f"### {markdown_text(table.title)}", markdown_table(table.headers, _plain(table)), table.note]
    return "\n\n".join(parts) + "\n"


def _plain(table: Table) -> list[list[str]]:
    return [[_bold(entry.text) if entry.best else entry.text for entry in row] for row in table.rows]


def _bold(text: str) -> Markdown:
    return Markdown(f"**{markdown_text(text)}**")


def _differences(entry: Compared) -> list[Table]:
    """Return tables of differences, if there are settings besides full KV."""
    return comparison_tables([entry]) if entry.from_full else []


def differences_section(tables: Sequence[Table]) -> str:
    return f"{unfolding(tables)}\n{h.paragraph(METHOD_NOTE, 'quiet')}" if tables else ""


def html_report(entry: Compared, pictures: Sequence[Picture]) -> str:
    results = entry.subject.results
    tables = make_tables(results, bounds, entry.from_full)
    shown = {kind: h.figures([picture for picture in pictures if picture.kind == kind]) for kind in
             ("accuracy", "tradeoff", "fidelity", "needle", "latency", "kept")}  # fmt: skip
    first = "\n".join(h.table(table, f"summary-{index}") for index, table in enumerate(tables.summary))
    sections = [
        ("summary", "Summary", first),
        ("settings", "Settings", "\n".join(h.table(table) for table in settings_table(results, entry.baseline))),
        ("differences", DIFFERENCES, differences_section(_differences(entry))),
        ("accuracy", "Score by budget", shown["accuracy"]),
        ("tradeoff", "Score against cost", shown["tradeoff"]),
        ("costs", "Costs", unfolding(tables.costs) + shown["latency"]),
        ("fidelity", "Distance to full KV", unfolding(tables.fidelity) + shown["fidelity"]),
        ("needle", "Needle by depth", shown["needle"]),
        ("kept", "Which tokens are kept", shown["kept"]),
        ("tasks", "Scores per task", _scores(tables)),
        ("not-run", "What did not run as asked", _not_run(results)),
        ("answers", "Example answers", _examples(results)),
        ("setup", "What was run", _setup(results)),
        ("glossary", "Glossary", h.definitions(GLOSSARY)),
    ]
    intro = f"{_facts(results)}\n{h.paragraph(_GUIDE)}\n{_warnings(results)}"
    return h.page(_title(results), [section for section in sections if section[2]], intro)


def _title(results: Results) -> str:
    return f"kvsieve evaluation: {results.run.get('model', 'unknown model')}"


def unfolding(tables: Sequence[Table]) -> str:
    """Return the first table, and the others collapsed."""
    parts = [h.table(table) for table in tables[:1]] + [h.details(table.title, h.table(table)) for table in tables[1:]]
    return "\n".join(parts)


def _scores(tables: Tables) -> str:
    return "\n".join([unfolding(tables.tasks), *[h.details(table.title, h.table(table)) for table in tables.metrics]])


def _facts(results: Results) -> str:
    run = results.run
    commits = distinct(str(machine.get("commit") or "unknown") for machine in _machines(results))
    lengths = ", ".join(str(length) for length in sorted(distinct(row["length"] for row in results.samples)))
    facts = (
        f"{run.get('dtype', 'unknown dtype')}, seed {run.get('seed', 'unknown')}, {len(results.tasks)} tasks, "
        f"{len(results.samples)} answers, prompts of {lengths or 'unknown'} tokens, {len(results.costs)} timed runs, "
        f"{_duration(run.get('seconds'))}; commit {', '.join(commits) or 'unknown'}."
    )
    return h.paragraph(facts, "quiet")


def _duration(seconds: Any) -> str:
    if not isinstance(seconds, (int, float)):
        return "unknown wall time"
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s wall time"
    return f"{minutes // 60} h {minutes % 60} min wall time" if minutes >= 60 else f"{minutes} min wall time"


def _machines(results: Results) -> list[Row]:
    """Return the environments that differ in more than time and command."""
    found: dict[str, Row] = {}
    for environment in results.run.get("environments") or []:
        found.setdefault(
            str({key: value for key, value in environment.items() if key not in ("time", "command")}), environment
        )
    return list(found.values())


def _warnings(results: Results) -> str:
    texts = []
    failed = [row for row in results.samples if row.get("applied") is False]
    if failed:
        names = ", ".join(distinct(row["label"] for row in failed))
        texts.append(f"In {len(failed)} of {len(results.samples)} answers the method did not run as asked ({names}); "
                     "they are listed below, and count in the means.")  # fmt: skip
    environments = results.run.get("environments") or []
    used = {row.get("env") for row in results.costs}
    same = ("processor", "device", "threads", "torch", "kvsieve", "commit")
    kinds = {str([environments[i].get(key) for key in same]) for i in used
             if isinstance(i, int) and 0 <= i < len(environments)}  # fmt: skip
    if len(kinds) > 1:
        texts.append("The costs were measured in environments that differ; compare times with care.")
    if results.costs and not any(row["label"] == FULL for row in results.costs):
        texts.append("Full KV was not timed: there are no ratios to it.")
    texts += [f"{text}." for text in cut_documents(results.samples)]
    return "\n".join(h.paragraph(text, "warn") for text in texts)


def _setup(results: Results) -> str:
    run = results.run
    facts = [("model", run.get("model")), ("dtype", run.get("dtype")), ("seed", run.get("seed")),
             ("haystack", run.get("haystack")), ("wall time", _duration(run.get("seconds"))),
             ("tasks", ", ".join(f"{title} ({name})" for name, title in results.tasks.items())),
             ("methods", "\n".join(results.labels))]  # fmt: skip
    parts = [h.text_table("Run", ["", "value"], [(name, str(value)) for name, value in facts if value is not None])]
    for number, machine in enumerate(_machines(results), 1):
        rows = [(str(name), str(value)) for name, value in machine.items()]
        parts.append(h.text_table(f"Environment {number}", ["", "value"], rows))
    return "\n".join(parts)


def _not_run(results: Results) -> str:
    counts: dict[tuple[str, ...], int] = {}
    for row in results.samples:
        notes = [str(note) for note in row.get("notes") or []]
        if row.get("applied") is False or notes:
            ran = "no" if row.get("applied") is False else "yes"
            key = (row["label"], budget_name(row["budget"]), results.tasks[row["task"]], str(row["length"]),
                   row["question"], ran, "; ".join(notes) or "no reason given")  # fmt: skip
            counts[key] = counts.get(key, 0) + 1
    if not counts:
        return h.paragraph("Every method ran as asked in every sample, and left no notes.")
    headers = ["method", "budget", "task", "length", "question", "ran", "note", "samples"]
    listed = h.text_table("Samples with notes", headers, [(*key, str(count)) for key, count in counts.items()])
    return listed if len(counts) <= 12 else h.details(f"{len(counts)} kinds of notes", listed)


def _examples(results: Results) -> str:
    """Return the first sample of every task at the longest length: expected and actual answers."""
    parts = []
    for task, title in results.tasks.items():
        task_rows = [row for row in results.samples if row["task"] == task]
        length = max(row["length"] for row in task_rows)
        first = min(row["sample"] for row in task_rows)
        for question in sorted(distinct(row["question"] for row in task_rows), reverse=True):
            rows = [r for r in task_rows if (r["length"], r["sample"], r["question"]) == (length, first, question)]
            rows.sort(key=lambda row: results.labels.index(row["label"]))
            if rows:
                name = f"{title}: sample {first}, {length} tokens, question {question}"
                parts.append(h.details(name, _example(name, rows)))
    return "\n".join(parts)


def _example(name: str, rows: Sequence[Row]) -> str:
    expected = "\n".join(", ".join(map(str, turn)) for turn in rows[0].get("expected") or [])
    lines = [("expected", "", "", _short(expected))]
    for row in rows:
        answers = "\n".join(_short(str(answer)) for answer in row.get("answers") or [])
        lines.append((row["label"], budget_name(row["budget"]), f"{100 * row['score']:.0f}", answers))
    return h.text_table(name, ["method", "budget", "score %", "answer"], lines)


def _short(answer: str) -> str:
    return answer if len(answer) <= _ANSWER_LENGTH else answer[:_ANSWER_LENGTH] + " …"
