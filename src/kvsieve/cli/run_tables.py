"""Tables of `kvsieve run` and `kvsieve demo`: answers, a sentence per method compared with full KV, and rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvsieve.cli.joined import print_joins
from kvsieve.cli.output import NARROW, WIDE, print_table, show
from kvsieve.planning.registry import method_info
from kvsieve.report.display import mebibytes, span

# Columns of `row` in a table 80 characters wide, besides the method; the last needs full KV.
COLUMNS = ("KV kept", "KV MiB", "TTFT s", "TPOT ms", "as full")
# Column of the time to first token if methods share a prefill.
_BEHIND = "first token s"
# Ratios closer to 1 count as equal.
_SAME = 1.05


def print_answers(results: list[dict[str, Any]], name: str = "method") -> None:
    """Print the answers. name: key of the methods' names, "label" with their parameters."""
    for result in results:
        mark = {True: "✓ ", False: "✗ ", None: ""}[result.get("correct")]
        show(f"{mark}{result[name]}: {result['answer']}")


def print_stats(results: list[dict[str, Any]], name: str = "method", *, wide: bool = False) -> None:
    """Print a sentence per method compared with full KV, a table, drafts, and notes on options that did not apply.

    Args:
        results: of `run_methods`.
        name: key of the methods' names, "label" with their parameters.
        wide: print all columns.
    """
    full = next((result for result in results if result["label"] == "full"), None) if len(results) > 1 else None
    for sentence in sentences(results, full):
        show(sentence)
    seconds = max((result.get("shared_prefill_s") or 0.0 for result in results), default=0.0)
    first = _BEHIND if seconds else "TTFT s"
    rows = [row(result, full, first) for result in results]
    narrow = [header.replace("TTFT s", first) for header in (*COLUMNS, "ran")]
    shown = list(rows[0]) if wide else [header for header in narrow if header in rows[0]][: len(COLUMNS)]
    # With spaces a table can break a name between two parameters.
    cells = [[result[name].replace(":", " "), *(one[header] for header in shown)]
             for result, one in zip(results, rows, strict=True)]  # fmt: skip
    print_table(["method", *shown], cells, width=WIDE if wide else NARROW)
    if seconds:
        show(f"The prompt was prefilled once, in {seconds:.1f} s; first token: seconds after that.")
        show("kvsieve bench times each method alone.")
    print_joins(results, name)
    for result in results:
        if result["stats"].drafts is not None:
            show(f"drafts: {result[name]}: {result['stats'].drafts}")
        if result["stats"].edited is not None and "join" not in result:
            show(f"edited: {result[name]}: {result['stats'].edited}")
        for note in result["stats"].notes:
            show(f"note: {result[name]}: {note}")


def sentences(results: list[dict[str, Any]], full: dict[str, Any] | None) -> list[str]:
    """Return a sentence per method compared with full KV; [] without full KV."""
    if full is None:
        return []
    count = Counter(result["method"] for result in results)
    found = []
    for result in results:
        if result is not full:
            title = method_info(result["method"]).title if count[result["method"]] == 1 else result["label"]
            found.append(f"{title}: {_compared(result, full)}")
    return found


def _compared(result: dict[str, Any], full: dict[str, Any]) -> str:
    stats = result["stats"]
    base = full["stats"]
    if not stats.applied:
        return "did not act on this prompt"
    at = result["differs_at"]
    parts = ["same answer" if at is None else f"answer {as_full(at)}"]
    if stats.kv_bytes:
        parts.append(_times(base.kv_bytes / stats.kv_bytes, "less KV", "more KV", "as much KV"))
    if "shared_prefill_s" not in result:
        parts.append(f"first token {_times(base.ttft_s / stats.ttft_s, 'sooner', 'later', 'as soon')}")
    return ", ".join(parts)


def _times(ratio: float, less: str, more: str, same: str) -> str:
    if 1 / _SAME < ratio < _SAME:
        return same
    return f"{ratio:.1f}x {less}" if ratio > 1 else f"{1 / ratio:.1f}x {more}"


def as_full(differs_at: int | None) -> str:
    """Compare an answer with full KV's in words. differs_at: see `run_methods`."""
    return "= full" if differs_at is None else f"differs at token {differs_at}"


def row(result: dict[str, Any], full: dict[str, Any] | None, first: str = "TTFT s") -> dict[str, str]:
    """Return a row of the table: cells by header. "as full" needs full KV. first: header of the time to first token."""
    stats = result["stats"]
    cells = {
        "prompt tokens": str(stats.prompt_tokens),
        "deep tokens": str(stats.deep_tokens),
        "KV budget": "all" if stats.kv_asked is None else str(stats.kv_asked),
        "KV kept": span(stats.kv_entries),
        "KV MiB": mebibytes(stats.kv_bytes, unit=""),
        first: f"{stats.ttft_s:.2f}",
        "TPOT ms": "-" if stats.tpot_s is None else f"{1000 * stats.tpot_s:.1f}",
        "peak MiB": "-" if stats.peak_bytes is None else f"{stats.peak_bytes / 2**20:.0f}",
        "ran": "yes" if stats.applied else "no",
    }
    if full is not None:
        cells["as full"] = "-" if result is full else as_full(result["differs_at"])
    return cells
