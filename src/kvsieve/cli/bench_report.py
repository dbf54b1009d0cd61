"""Reports of `kvsieve bench`: loading, printing and drawing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from kvsieve.cli.output import NARROW, WIDE, emit_json, print_table, say, show
from kvsieve.errors import InputError
from kvsieve.report.tables import markdown_table
from kvsieve.text import markdown_text

# Of every report; "lengths" has the measurements.
_KEYS = {"model", "dtype", "device", "batch", "new_tokens", "contenders", "rates", "lengths"}


def read_report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--show cannot read {str(path)!r}: {error}") from error
    if not isinstance(report, dict) or not set(report) >= _KEYS:
        raise InputError(f"--show expects a report that `kvsieve bench --out` wrote, got {str(path)!r}")
    return report


def print_report(report: dict[str, Any], plots: Path | None, markdown: bool, as_json: bool, wide: bool = False) -> None:
    """Print a report as tables, Markdown or JSON, and draw it into the directory `plots`; wide: all columns."""
    from kvsieve.lab.bench.tables import notes

    drawn = plots is None or _draw(report, plots)
    for note in notes(report):
        say(f"note: {note}")
    if as_json:
        emit_json(report)
    else:
        _print(report, markdown, wide)
    if not drawn:
        raise typer.Exit(1)


def _draw(report: dict[str, Any], plots: Path) -> bool:
    """Draw a report; print why that failed and return False, so that its tables are still printed."""
    from kvsieve.lab.bench.plots import draw

    try:
        for file in draw(report, plots):
            say(f"drew {file}")
    except OSError as error:
        say(f"error: cannot write into --plots {str(plots)!r}: {error.strerror or error}")
        return False
    return True


def _print(report: dict[str, Any], markdown: bool, wide: bool) -> None:
    from kvsieve.lab.bench.tables import closing, tables

    if report["rates"] is not None:
        bandwidth = report["rates"]["bandwidth_gb_per_s"]
        matmul = report["rates"]["matmul_tflops"]
        show(f"{report['model']}, {report['dtype']}, {report['device']}, {report['new_tokens']} new tokens")
        show(f"matrix-vector {bandwidth:.1f} GB/s, matmul {matmul:.3g} TFLOP/s, measured in this run")
    if report.get("cpu") is not None:
        show(f"{report['cpu']['kind']}: {report['cpu']['attention']}")
    for title, headers, rows in tables(report, wide=wide or markdown):
        if markdown:
            show(f"\n{markdown_text(title)}\n\n{markdown_table(headers, rows)}")
        else:
            show(f"\n{title}")
            print_table(headers, rows, width=WIDE if wide else NARROW)
    show("")
    for line in closing(report):
        show(f"- {line}" if markdown else line)
