"""Tables of a report of `kvsieve bench`: (title, headers, rows)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsieve.lab.bench.compare import ALONE, growth
from kvsieve.lab.bench.contenders import BASELINE, is_peer

Table = tuple[str, list[str], list[list[str]]]
_MIB = 2**20
_UNKNOWN = "-"
# Columns of a table 80 characters wide: times, memory, batch.
_TIMES = (0, 1, 3, 4, 6, 7)
_MEMORY = (0, 1, 2, 6)
_BATCH = (0, 1, 2, 3)


def tables(report: dict[str, Any], *, wide: bool = True) -> list[Table]:
    """Return tables of times and limits, memory, batch and peer, if any, and growth over length.

    Times are medians; a ratio in brackets is to plain transformers, the median of the ratios within each round.
    Contenders that did not act as requested have no ratios.

    Args:
        report: of `kvsieve bench`.
        wide: all columns; else at most six of each table.
    """
    found: list[Table] = []
    for length, entry in report["lengths"].items():
        summary = entry["summary"]
        parts = [(_times(length, summary, report), _TIMES), (_memory(length, summary), _MEMORY)]
        if report["batch"] > 1:
            parts.append((_batch(length, summary, report["batch"]), _BATCH))
        found += [table if wide else _narrow(table, columns) for table, columns in parts]
        peers = [name for name in summary if is_peer(name)]
        if peers:
            found.append(_beside(length, summary, peers))
    if len(report["lengths"]) > 1:
        found.append(_growth(report))
    return found


def _narrow(table: Table, columns: Sequence[int]) -> Table:
    title, headers, rows = table
    return title, [headers[at] for at in columns], [[row[at] for at in columns] for row in rows]


def notes(report: dict[str, Any]) -> list[str]:
    """Return a line for each contender that did not run as requested; those that did not act first."""
    silent = []
    notes = []
    for length, entry in report["lengths"].items():
        for name, row in entry["summary"].items():
            text = f"{length} tokens: {name}: {'; '.join(row['notes'])}"
            if not row["applied"]:
                silent.append(f"DID NOT ACT, its times are no measure of it: {text}")
            elif row["notes"]:
                notes.append(text)
            if row["capture_s"] and row["capture_s"]["median"]:
                took = row["capture_s"]["median"]
                notes.append(f"{length} tokens: {name}: capturing took {took:.2f} s, which TPOT leaves out")
    if report.get("limits_unknown"):
        notes.append(f"limits are not known: {report['limits_unknown']}")
    return silent + notes


def closing(report: dict[str, Any]) -> list[str]:
    """Return a line per method at the longest prompt: its saving, its time by part, its distance from the limit."""
    length, entry = max(report["lengths"].items(), key=lambda item: int(item[0]))
    notes = []
    for name, row in entry["summary"].items():
        if not row["applied"]:
            notes.append(f"{name}, {length} tokens: did not act")
            continue
        parts = [] if name == BASELINE else [_saved(row)]
        for phase, metric, what in (("prompt", "ttft", "prompt"), ("token", "tpot", "token")):
            shares = row.get("time_shares", {}).get(phase)
            limit = _of_limit(row, metric)
            where = [] if shares is None else [_shares(shares)]
            where += [] if limit is None else [f"{_plain(limit, 1, 1)} x its limit"]
            parts += [f"{what}: {', '.join(where)}"] if where else []
        notes.append(f"{name}, {length} tokens: {'; '.join(part for part in parts if part)}")
    return notes


def _saved(row: dict[str, Any]) -> str:
    """Return the saving of a method relative to the baseline, in percent; negative for extra cost."""
    found = []
    for metric, what in (("ttft_s", "to the first token"), ("tpot_s", "per token"), ("kv_bytes", "KV memory")):
        ratio = _ratio(row, BASELINE, metric)
        if ratio is not None:
            found.append(f"{100 * (1 - ratio):.0f}% {what}")
    return f"saves {', '.join(found)}" if found else ""


def _of_limit(row: dict[str, Any], metric: str) -> float | None:
    """Return time over its limit; None below 1, which means that the rate was measured too low."""
    found = row.get(f"{metric}_of_limit")
    return None if found is None or found < 1 else found


def _shares(shares: dict[str, float]) -> str:
    names = {"attention": "attention", "weights": "products with weights", "rest": "rest"}
    return ", ".join(f"{label} {100 * shares[name]:.0f}%" for name, label in names.items())


def _times(length: str, summary: dict[str, Any], report: dict[str, Any]) -> Table:
    rows_of = f" in {report['batch']} unequal rows, padded" if report["batch"] > 1 else ""
    headers = [
        "method",
        "TTFT s",
        "limit s",
        "x limit",
        "TPOT ms",
        "limit ms",
        "x limit",
        "decode tok/s",
        "total tok/s",
    ]
    rows = []
    for name, row in summary.items():
        rows.append(
            [
                _name(name, row),
                _with_ratio(row, "ttft_s", 1, 2),
                _plain(row.get("ttft_limit_s"), 1, 2),
                _plain(_of_limit(row, "ttft"), 1, 1),
                _with_ratio(row, "tpot_s", 1e3, 1),
                _plain(row.get("tpot_limit_s"), 1e3, 1),
                _plain(_of_limit(row, "tpot"), 1, 1),
                _median(row, "decode_tokens_per_s", 1, 1),
                _median(row, "tokens_per_s", 1, 2),
            ]
        )
    return f"{length} tokens{rows_of}", headers, rows


def _memory(length: str, summary: dict[str, Any]) -> Table:
    headers = ["method", "KV MiB", "KV read MiB/token", "KV after prompt", "at most in it", "allowed", "peak MiB"]
    rows = [
        [
            _name(name, row),
            _with_ratio(row, "kv_bytes", 1 / _MIB, 1, 3),
            _median(row, "kv_read_bytes", 1 / _MIB, 1),
            _plain(row.get("kv_final_bytes"), 1 / _MIB, 1),
            _plain(row.get("kv_peak_bytes"), 1 / _MIB, 1),
            _plain(row.get("kv_bound_bytes"), 1 / _MIB, 1),
            _median(row, "peak_bytes", 1 / _MIB, 0),
        ]
        for name, row in summary.items()
    ]
    return f"{length} tokens: memory (allowed: what stays and one layer's full KV)", headers, rows


def _batch(length: str, summary: dict[str, Any], batch: int) -> Table:
    headers = ["method", "decode tok/s", "one by one", "ratio", "total tok/s", "one by one", "ratio"]
    rows = [
        [
            _name(name, row),
            _median(row, "decode_tokens_per_s", 1, 1),
            _median(row, "alone_decode_tokens_per_s", 1, 1),
            _median(row, "decode_gain", 1, 2),
            _median(row, "tokens_per_s", 1, 2),
            _median(row, "alone_tokens_per_s", 1, 2),
            _median(row, "gain", 1, 2),
        ]
        for name, row in summary.items()
    ]
    return f"{length} tokens: {batch} rows as one batch, and one by one", headers, rows


def _beside(length: str, summary: dict[str, Any], peers: list[str]) -> Table:
    # The peer runs a batch's rows one by one only.
    quantities = ("ttft_s", "tpot_s")
    said = "TTFT and TPOT"
    if summary[peers[0]]["ttft_s"] is None:
        quantities = ALONE
        said = "one by one, tokens/s while decoding and in all,"
    rows = [
        [_name(name, row), *(", ".join(_plain(_ratio(row, peer, q), 1, 2) for q in quantities) for peer in peers)]
        for name, row in summary.items()
        if name not in peers
    ]
    return (
        f"{length} tokens: {said} over the peer's, within each round",
        ["method", *(_name(peer, summary[peer]) for peer in peers)],
        rows,
    )


def _growth(report: dict[str, Any]) -> Table:
    lengths = sorted(report["lengths"], key=int)
    summaries = [report["lengths"][length]["summary"] for length in lengths]
    grown = growth(report)
    headers = ["method", f"TPOT {lengths[-1]} / {lengths[0]}", *(f"TTFT ratio at {length}" for length in lengths)]
    rows = []
    for name, row in summaries[0].items():
        ratios = [_ratio(summary[name], BASELINE, "ttft_s") if name in summary else None for summary in summaries]
        rows.append([_name(name, row), _plain(grown.get(name), 1, 2), *(_plain(ratio, 1, 2) for ratio in ratios)])
    return f"growth with the prompt (ratios to {BASELINE})", headers, rows


def _name(name: str, row: dict[str, Any]) -> str:
    return name if row["applied"] else f"{name} (DID NOT ACT)"


def _ratio(row: dict[str, Any], reference: str, metric: str) -> float | None:
    spread = row["ratios"].get(reference, {}).get(metric)
    return spread["median"] if spread and row["applied"] else None


def _plain(value: float | None, scale: float, digits: int) -> str:
    if value is None:
        return _UNKNOWN
    scaled = value * scale
    # A tiny model's numbers would all be 0.00.
    return f"{scaled:.{digits}f}" if scaled >= 10**-digits or not scaled else f"{scaled:.1g}"


def _median(row: dict[str, Any], metric: str, scale: float, digits: int) -> str:
    return _plain(row[metric]["median"] if row[metric] else None, scale, digits)


def _with_ratio(row: dict[str, Any], metric: str, scale: float, digits: int, ratio_digits: int = 2) -> str:
    ratio = _ratio(row, BASELINE, metric)
    return _median(row, metric, scale, digits) + ("" if ratio is None else f" ({ratio:.{ratio_digits}f})")
