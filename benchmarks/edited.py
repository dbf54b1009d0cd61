"""Tables of edited and joined caches, from benchmarks/answers/edits.py and joins.py; empty before they have run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.evidence import MODELS, RESULTS, described
from benchmarks.toys.tables import markdown

# Sets of documents of joins.py in words.
SETS = {"natural": "natural questions, word F1", "generated": "questions on generated documents, right answers"}


def edits_table(folder: Path = RESULTS) -> str:
    """Return a table per model and dtype, with a row per plan and window."""
    return "\n\n".join(_edits(json.loads(file.read_text())) for file in sorted(folder.glob("edits*.json")))


def _edits(report: dict[str, Any]) -> str:
    rows = report["summary"]
    lines = [
        [
            f"`{row['plan']}`",
            str(row["window"]),
            f"{row['reused']:.1%}",
            f"{row['ratio']:.3f}",
            f"{row['equal']:.1%}",
            f"{row['kl']:.4f}",
            str(row["turns"]),
        ]
        for row in rows
    ]
    head = ["plan", "window", "reused", "first token over anew", "same answers", "KL", "turns"]
    said = (
        f"{_where(report)}; prompts of {rows[0]['prompt']:,.0f} tokens (median), answers of {report['answer']} tokens "
        "(`python benchmarks/answers/edits.py`):"
    )
    return f"{said}\n\n{markdown(head, lines)}"


def joins_table(folder: Path = RESULTS) -> str:
    """Return a table per model and set of documents, with a row per plan and kind."""
    return "\n\n".join(_joins(json.loads(file.read_text())) for file in sorted(folder.glob("joins*.json")))


def _joins(report: dict[str, Any]) -> str:
    parts = [f"{_where(report)} (`python benchmarks/answers/joins.py`)."]
    head = ["plan", "join", "score", "of full", "first token over full", "KL", "same answers"]
    for name, title in SETS.items():
        rows = [row for row in report["summary"] if row["set"] == name]
        if not rows:
            continue
        lines = [
            [
                f"`{row['plan']}`",
                f"`{row['kind']}`",
                f"{row['score']:.3f}",
                "" if row["of_full"] is None else f"{row['of_full']:.0%}",
                f"{row['ratio']:.3f}",
                f"{row['kl']:.3f}",
                f"{row['same']:.0%}",
            ]
            for row in rows
        ]
        tokens = next(row["tokens"] for row in rows if row["kind"] == "full")
        parts.append(f"{rows[0]['questions']} {title}, {tokens:,} tokens (median):\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def _where(report: dict[str, Any]) -> str:
    stamp = report["environments"][-1]
    name = report["model"]
    model = described(name) if name in MODELS else name
    return f"{model} in {report['dtype']} on {stamp['processor']}, {stamp['threads']} threads"
