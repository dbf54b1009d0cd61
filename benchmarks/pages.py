"""Write the generated parts of README.md and of pages in docs, and draw their pictures.

    python -m benchmarks.pages

All of it comes from committed results (benchmarks/evidence.py); results that are not there yet leave their cells empty,
and are taken in once they are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.edited import edits_table, joins_table
from benchmarks.evidence import MODELS, RESULTS, Evidence, described, evidence, provenance
from benchmarks.evidence import rows as samples_of
from benchmarks.glance import OWN, glances, is_of_shares
from benchmarks.toys.tables import filled, markdown, summary
from kvsieve.planning.profiles import load_profile, shipped_profiles
from kvsieve.report.plot_style import PNG_DPI, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
MIB = 2**20
PARTS = (
    ("rocketkv", "multiturn", "conversations"),
    ("rocketkv", "shared", "conversations, copies"),
    ("lagkv", "grid", "64 digits, lagkv"),
    ("lagkv", "attention", "64 digits"),
)
METHODS = ("snapkv", "adakv", "fastkv", "asl", "rocketkv", "rocketkv-mt", "kvzip", "lagkv", "streamingllm")
ROWS = (
    ("transformers", ""),
    ("full", ""),
    ("fastkv", "10%"),
    ("snapkv", "10%"),
    ("rocketkv", "10%"),
    ("rocketkv", "256"),
)
# Tasks of benchmarks/speed/copying.py in words.
DRAFTED_TASKS = {
    "edit": "write a function again",
    "quote": "quote a paragraph",
    "table": "rows of a table as JSON",
    "summary": "summarize",
    "free": "write a story",
}
# Engines of benchmarks/speed/weights.py in words.
ENGINES = {
    "blocks": "kvsieve, file in blocks",
    "bfloat16": "kvsieve, expanded to bfloat16",
    "llama.cpp": "llama.cpp, compiled for this processor",
    "llama.cpp, wheel": "llama.cpp, a wheel for all processors",
}
SHOWN = {"transformers": "transformers", "full": "kvsieve, full KV"}
COLOURS = {
    "transformers": "#8c8c8c",
    "full": "#222222",
    "snapkv": "#0072B2",
    "adakv": "#56B4E9",
    "fastkv": "#009E73",
    "asl": "#CC79A7",
    "rocketkv": "#D55E00",
    "rocketkv-mt": "#E69F00",
    "kvzip": "#7B3FA0",
    "lagkv": "#8B5A2B",
    "streamingllm": "#999933",
    "h2o": "#882255",
    "hsa": "#44AA99",
    "exacttopk": "#DDCC77",
    "lagkv, lag 128": "#D2A679",
    "lagkv, lag 512": "#B07840",
    "lagkv, lag 1024": "#6B3E10",
}
SHOWS = {
    "bytes": "Score against KV stored",
    "hidden": "Score where the question is hidden",
    "conversations": "Answers right in conversations",
    "long": "Digits right against KV stored",
    "speed": "Times against the prompt's length",
}
MARKERS = "os^Dv<>PXph"
Points = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Panel:
    """One diagram: points of each series with ticks at `places`, or with `bars` a value of each for every group."""

    title: str
    x: str
    y: str
    series: Points
    places: tuple[int, ...] = ()
    bars: tuple[str, ...] = ()


@dataclass(frozen=True)
class LabelledPanel(Panel):
    """A diagram of many series: names at their last points in place of a legend."""


def main() -> None:
    found = evidence()
    PICTURES.mkdir(exist_ok=True)
    for name, panels in pictures(found).items():
        draw(panels, PICTURES / f"{name}.png")
    for page, parts in pages(found).items():
        page.write_text(filled(page.read_text(), parts))


def pages(found: list[Evidence]) -> dict[Path, dict[str, str]]:
    """Generated parts of each page by the name of their mark."""
    return {
        ROOT / "README.md": {"gains": gains(found[0]), "measured": summary_table(found[0])},
        ROOT / "docs" / "choosing.md": {
            "models": "\n".join(f"- {described(each.name)}" for each in found),
            "use": use_table(found[0]),
            **captions(found[0]),
            "numbers": "\n\n".join(numbers_table(each) for each in found if each.sets),
            "provenance": provenance_table(found),
        },
        ROOT / "docs" / "performance.md": {
            "speed": "\n\n".join(speed_table(each) for each in found if each.speeds),
            "busy": busy_table(),
            "h100": gpu_table(),
        },
        ROOT / "docs" / "serving.md": {"peers": peers_table()},
        ROOT / "docs" / "speculation.md": {"drafts": drafts_tables()},
        ROOT / "docs" / "editing.md": {"edits": edits_table(), "joins": joins_table()},
        ROOT / "docs" / "options.md": {"floor": floor_table()},
        ROOT / "docs" / "weights.md": {"measured": weights_measured(found[0])},
        ROOT / "docs" / "calibrate.md": {"profiles": profiles_table()},
        ROOT / "docs" / "evaluation.md": {"toys": summary(RESULTS)},
    }


# Numbers


def kept(one: Evidence, name: str, method: str, budget: str) -> str:
    """The share of full KV's score with its interval; empty where that was not measured."""
    measured = one.sets.get(name)
    found = None if measured is None else measured.found.get((method, budget))
    return "" if found is None else str(found)


def share(one: Evidence, name: str, method: str, budget: str) -> str:
    return kept(one, name, method, budget).partition(" ")[0]


def contender(summary: dict[str, Any], method: str, budget: str = "") -> dict[str, Any] | None:
    """The row of a method at a budget in a report of `kvsieve bench`, whatever its other parameters."""
    for label, row in summary.items():
        name, *given = label.split(":")
        if name == method and (not budget or f"budget={budget}" in given):
            return row
    return None


def ratio(one: Evidence, length: int, method: str, quantity: str, to: str) -> str:
    row = contender(one.speeds[length]["summary"], method) if length in one.speeds else None
    return "" if row is None else f"{row['ratios'][to][quantity]['median']:.2f}"


# Tables


def summary_table(one: Evidence) -> str:
    """The README's: times, memory and answers of a few methods."""
    longest = max(one.speeds)
    head = ["", "first token, s", "per token, ms", "KV, MiB", "RULER 8K kept", "documents kept"]
    lines = []
    for method, budget in ROWS:
        row = contender(one.speeds[longest]["summary"], method, budget)
        times = ["", "", ""]
        if row is not None:
            times = [f"{row['ttft_s']['median']:.1f}", f"{1000 * row['tpot_s']['median']:.0f}"]
            times.append(f"{row['kv_bytes']['median'] / MIB:.0f}")
        answers = ["100%" if method == "full" else kept(one, name, method, budget) for name in ("ruler", "documents")]
        if any(times + answers):
            lines.append([SHOWN.get(method, f"`{method}` {budget}"), *times, *answers])
    return markdown(head, lines)


def use_table(one: Evidence) -> str:
    """The method for each case, and its share of full KV's score."""

    def both(name: str, method: str) -> str:
        return f"{share(one, name, method, '10%')} at 10%, {share(one, name, method, '25%')} at 25%"

    turns = by_ratio(one.scores("rocketkv", "multiturn"))
    digits = one.scores("lagkv", "attention", "partial")
    rows = [
        [
            "one question, known at prefill",
            "`snapkv` or `adakv`, 25%",
            f"generated tasks: {both('ruler', 'snapkv')}; real documents: {both('documents', 'snapkv')}",
        ],
        ["the same, with an earlier first token", "`fastkv`, 25%", f"real documents: {both('documents', 'fastkv')}"],
        [
            "later tokens may need other entries than the question",
            "`rocketkv`, 10%",
            f"real documents: {both('documents', 'rocketkv')}; it stores 40 and 64% of the entries",
        ],
        ["a context compressed before its question", "`kvzip`, 25%", f"real documents: {both('hidden', 'kvzip')}"],
        [
            "a conversation about one document",
            "`rocketkv-mt`",
            f"{turns['rocketkv-mt']['1/32']:.0f}% of the answers, full KV {turns['full']['']:.0f}%; stores all "
            "entries, reads 1/32 of them a token",
        ],
        [
            "long copied answers: keys, UUIDs, long numbers",
            "`snapkv` with 700 entries or more",
            f"{digits['snapkv 8x'][0]:.0f}% of 64 digits right with 736 of 4,096 entries",
        ],
        ["a limit in bytes, or a model of your own", "[`kvsieve advise`](#advice)", "printed with the advice"],
    ]
    return markdown(["your case", "use", "share of full KV's score"], rows)


def numbers_table(one: Evidence) -> str:
    """Every method on every set of prompts, in percent of full KV's score."""
    columns = [(name, budget) for name, measured in one.sets.items() for budget in measured.budgets]
    head = ["method", *(f"{one.sets[name].title}, {budget}" for name, budget in columns)]
    lines = [["`full`, score", *(f"{one.sets[name].found['full', None].score:.0f}" for name, _ in columns)]]
    for method in METHODS:
        cells = [kept(one, name, method, budget).replace("%", "") for name, budget in columns]
        if any(cells):
            lines.append([f"`{method}`", *cells])
    return f"**{one.name}**\n\n{markdown(head, lines)}"


def provenance_table(found: list[Evidence]) -> str:
    """Where each column comes from."""
    lines = []
    for one in found:
        for measured in one.sets.values():
            lines.append([measured.title, str(measured.prompts), *_from(one, list(measured.folders))])
        for study, part, title in PARTS:
            scores = one.scores(study, part)
            if scores:
                lines.append([title, str(max(n for *_, n in scores.values())), *_from(one, [one.paper(study, part)])])
        for length, speed in one.speeds.items():
            rounds = f"{speed['report']['rounds']} rounds"
            lines.append([f"speed, {length // 1024}K", rounds, *_from(one, [speed["file"]])])
    return markdown(["measured", "prompts", "model", "files", "machine", "kvsieve", "commit", "weights"], lines)


def _from(one: Evidence, places: list[Path]) -> list[str]:
    names = " ".join(f"`{each.relative_to(one.results)}`" for each in places)
    files = [each / "run.json" if each.is_dir() else each for each in places]
    return [one.name.removesuffix("-Instruct"), names, *provenance(files)]


def speed_table(one: Evidence) -> str:
    """Times and memory of `kvsieve bench` at every length."""
    head = [
        "tokens",
        "",
        "first token",
        "over own full KV",
        "per token",
        "over own full KV",
        "KV stored",
        "peak memory",
    ]
    lines = []
    for length, speed in one.speeds.items():
        for label, row in speed["summary"].items():
            to_full = row["ratios"].get("full", {})
            cells = [f"{row['ttft_s']['median']:.1f} s", _median(to_full, "ttft_s")]
            cells += [f"{1000 * row['tpot_s']['median']:.0f} ms", _median(to_full, "tpot_s")]
            cells += [f"{row[each]['median'] / MIB:,.0f} MiB" for each in ("kv_bytes", "peak_bytes")]
            lines.append([f"{length:,}", f"`{label}`", *cells])
    report = next(iter(one.speeds.values()))["report"]
    stamp = report["environment"]
    machine = f"{stamp['processor']}, {stamp['cores']} cores, {stamp['threads']} threads"
    rounds = sorted({each["report"]["rounds"] for each in one.speeds.values()})
    said = f"{described(one.name)} on {machine}; medians of {' and '.join(map(str, rounds))} rounds."
    return f"{said}\n\n{markdown(head, lines)}"


def _median(ratios: dict[str, Any], quantity: str) -> str:
    return f"{ratios[quantity]['median']:.2f}" if ratios.get(quantity) else ""


def gpu_table() -> str:
    """128K tokens on the H100: RocketKV beside a compiled full KV, memory at the peak included."""
    summary = json.loads((RESULTS / "gpu_128k.json").read_text())["summary"]["1"]["131072"]
    full = summary["full"]
    lines = []
    for label, row in summary.items():
        cells = [f"{row['ttft_s']['median']:.2f}", f"{full['ttft_s']['median'] / row['ttft_s']['median']:.2f}"]
        cells += [f"{1000 * row['tpot_s']['median']:.1f}", f"{full['tpot_s']['median'] / row['tpot_s']['median']:.2f}"]
        cells += [f"{row[each]['median'] / MIB:,.0f}" for each in ("kv_bytes", "peak_bytes")]
        lines.append([f"`{label}`", *cells, f"{1 - row['peak_bytes']['median'] / full['peak_bytes']['median']:.0%}"])
    head = ["", "first token, s", "speed over full KV", "per token, ms", "speed over full KV", "KV, MiB", "peak, MiB"]
    return markdown([*head, "saved at the peak"], lines)


def floor_table() -> str:
    """Answers of short prompts under each floor, as benchmarks/answers/floor.py has measured them."""
    report = json.loads((RESULTS / "floor.json").read_text())
    groups = list(dict.fromkeys(row["group"] for row in report["rows"]))
    lines = []
    for method, floor in dict.fromkeys((row["method"], row["floor"]) for row in report["rows"]):
        cells = []
        for group in groups:
            mine = [
                row for row in report["rows"] if (row["method"], row["floor"], row["group"]) == (method, floor, group)
            ]
            cells.append(", ".join(f"{sum(row[of] for row in mine) / len(mine):.0%}" for of in ("equal", "alike")))
        lines.append([method, str(floor), *cells])
    model = report.get("model", "SmolLM2-135M-Instruct")
    weights = "" if model not in MODELS else f", {described(model).partition('; ')[2].rstrip(')')}"
    return f"Answers of {model}{weights}:\n\n{markdown(['method', 'floor', *groups], lines)}"


def busy_table() -> str:
    """Times beside a program that keeps one core busy (benchmarks/speed/busy.py)."""
    report = json.loads((RESULTS / "busy.json").read_text())
    lines = []
    for name, found in report["contenders"].items():
        first, token = found["ttft_s"], found["tpot_s"]
        seconds = [f"{first[state]:.2f}" for state in ("idle", "busy")]
        milliseconds = [f"{1000 * token[state]:.0f}" for state in ("idle", "busy")]
        lines.append([name, *seconds, f"{first['ratio']:.2f}", *milliseconds, f"{token['ratio']:.2f}"])
    head = ["", "first token, s", "busy", "ratio", "per token, ms", "busy", "ratio"]
    where = f"{report['environment']['processor']}, {report['threads']} threads"
    said = f"{described(report['model'])} on {where}, {report['tokens']:,} tokens, medians of"
    return f"{said} {report['rounds']} rounds:\n\n{markdown(head, lines)}"


def drafts_tables() -> str:
    """Return what was measured of drafts, without the parts that were not."""
    tasks = (drafts_table(file) for file in sorted(RESULTS.glob("drafts_speed*.json")))
    served = (drafts_served_table(file) for file in sorted(RESULTS.glob("drafts_serve*.json")))
    parts = drafts_passes(), *tasks, drafts_of_views_table(), *served, drafts_identical()
    return "\n\n".join(part for part in parts if part)


def drafts_passes() -> str:
    """Passes over several tokens beside those over one (benchmarks/speed/tentative.py)."""
    report = json.loads((RESULTS / "drafts_passes.json").read_text())
    ((length, plans),) = report["milliseconds"].items()
    ratios = {size: ratio for size, ratio in plans["full"]["ratio"].items() if size != "1"}
    times = ", ".join(f"{ratio:.2f}" for ratio in ratios.values())
    said = f"A pass over {', '.join(ratios)} tokens takes {times} times one over a single token"
    where = f"{_described(report['model'])} in {report['dtype']} on {report['environment']['processor']}"
    return f"{said} at {int(length):,} tokens, {where} (`python benchmarks/speed/tentative.py`)."


def drafts_table(file: Path) -> str:
    """Tokens per second with drafts over those without, by task (benchmarks/speed/speculation.py)."""
    report = json.loads(file.read_text())
    lengths = sorted({row["length"] for row in report["summary"]})
    by: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for row in report["summary"]:
        by.setdefault((row["plan"], row["draft"], row["task"]), {})[row["length"]] = row
    lines = []
    for plan, draft, task in sorted(by, key=lambda key: (*key[:2], list(DRAFTED_TASKS).index(key[2]))):
        found = by[plan, draft, task]
        cells = [f"{found[length]['ratio']:.2f}" if length in found else "" for length in lengths]
        last = found[max(found)]
        accepted = f"{last['accepted']:.0%}" if last["tokens_per_pass"] > 1 else "nothing drafted"
        cells += [f"{last['tokens_per_pass']:.1f}", accepted, f"{last['same']} of {last['samples']}"]
        lines.append([DRAFTED_TASKS[task], f"`{plan}`", f"`{draft}`", *cells])
    longest = f"{lengths[-1]:,}"
    head = ["task", "plan", "draft", *(f"{length:,} tokens" for length in lengths), f"tokens a pass, {longest}"]
    head += ["drafted tokens accepted", "answers equal"]
    stamp = report["environments"][0]
    where = f"{stamp['processor']}, {stamp['cores']} cores, {stamp['threads']} threads"
    if stamp["device"] != "cpu":
        where = stamp["device"]
    counts = sorted(row["samples"] for row in report["summary"])
    samples = " to ".join(map(str, sorted({counts[0], counts[-1]})))
    said = (
        f"Tokens per second over those without drafts, {_described(report['model'])} in {report['dtype']} on {where},"
    )
    return f"{said} medians of {samples} prompts (`python benchmarks/speed/speculation.py`):\n\n{markdown(head, lines)}"


def drafts_of_views_table() -> str:
    """Drafts by the model's own views of its cache on a GPU (benchmarks/speed/drafts_of_views.py)."""
    file = RESULTS / "drafts_of_views_gpu.json"
    if not file.exists():
        return ""
    report = json.loads(file.read_text())
    lines = []
    for row in report["summary"]:
        if row["task"] == "all":
            cells = f"{row['length']:,}", f"`self:{row['view']}`", f"{row['accepted']:.0%}"
            lines.append([*cells, *(f"{row[each]:.1f}" for each in ("tokens_per_pass", "draft", "verify"))])
    head = ["tokens", "draft", "accepted", "tokens a pass", "time of a drafted token", "of a pass that verifies"]
    device = report["environments"][0]["device"]
    said = f"{_described(report['model'])} on {device} drafts {report['drafted']} tokens for"
    times = "each pass of a short answer; times, recording included, are in plain passes"
    return f"{said} {times} (`python benchmarks/speed/drafts_of_views.py`):\n\n{markdown(head, lines)}"


def _described(name: str) -> str:
    return described(name) if name in MODELS else name


def drafts_served_table(file: Path) -> str:
    """Servers with and without drafts (benchmarks/speed/speculation_serve.py)."""
    report = json.loads(file.read_text())
    found = report["summary"]
    lines = []
    for key, name in (("without", "without drafts"), ("with", f"`--draft {report['draft']}`"), ("ratio", "ratio")):
        rate, *gaps = (found[f"{each}_{key}"] for each in ("tokens_per_s", "gap_median_s", "gap_p95_s"))
        cells = [f"{each:.2f}" if key == "ratio" else f"{1000 * each:.0f} ms" for each in gaps]
        lines.append([name, f"{rate:.2f}" if key == "ratio" else f"{rate:.1f}", *cells])
    said = f"{report['clients']} clients of a server that edit one file of {report['length']:,} tokens, on"
    said += f" {report['environment']['processor']}, medians of"
    head = ["", "tokens per second", "median gap", "95th percentile of gaps"]
    rounds = f"{len(report['rounds'])} rounds (`python benchmarks/speed/speculation_serve.py`)"
    return f"{said} {rounds}:\n\n{markdown(head, lines)}"


def drafts_identical() -> str:
    """The count of tokens that drafts have changed (benchmarks/answers/identical_drafts.py)."""
    file = RESULTS / "drafts_identical.json"
    if not file.exists():
        return ""
    rows = list(json.loads(file.read_text())["rows"].values())
    total = {name: sum(row[name] for row in rows) for name in ("tokens", "drafted", "accepted")}
    differing = sum(len(row["differences"]) for row in rows)
    families, plans = (len({row[name] for row in rows}) for name in ("family", "plan"))
    return (
        f"Greedy answers in float32 to {rows[0]['prompts']} prompts of {families} model families under {plans} plans: "
        f"of {total['tokens']:,} tokens {total['accepted']:,} come from drafts ({total['drafted']:,} drafted). "
        f"Answers that differ from those without drafts: {differing} (`python benchmarks/answers/identical_drafts.py`)."
    )


def peers_table() -> str:
    """Servers side by side on a model (benchmarks/speed/serve_against.py): kvsieve's times, others' over them."""
    reports = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("serve_against*.json"))]
    reports = sorted((each for each in reports if each["model"] in MODELS), key=lambda each: -each["rounds"])
    if not reports:
        return "Not measured."
    base = "kvsieve"
    places = sorted({(cell["clients"], cell["tokens"]) for each in reports for cell in each["servers"][base]["cells"]})
    lines = []
    for name in dict.fromkeys(name for report in reports for name in report["servers"]):
        report = next(report for report in reports if name in report["servers"])
        server, line = report["servers"][name], [f"{name}, times" if name == base else name]
        cells = {(cell["clients"], cell["tokens"]): cell for cell in server["cells"]}
        for cell in map(cells.get, places):
            if cell is None:
                line += ["", ""]
            elif name == base:
                line += [f"{cell['ttft_s']:.1f} s", f"{1000 * cell['tpot_s']:.0f} ms"]
            else:
                line += [f"{cell['ttft_s_ratio']:.2f}", f"{cell['tpot_s_ratio']:.2f}"]
        lines.append([*line, f"{server['memory_bytes'] / 2**30:.1f}", str(report["rounds"])])
    where = f"{reports[0]['environment']['processor']}, {reports[0]['threads']} threads"
    said = f"Servers beside it, {described(reports[0]['model'])}, on {where}: kvsieve's medians, and the others' times"
    clients = ["" if number == 1 else f", {number} clients" for number, _ in places]
    tokens = [f"{length:,} tokens{more}" for (_, length), more in zip(places, clients, strict=True)]
    head = ["server", *(f"{each}: {what}" for each in tokens for what in ("first", "each later")), "GiB", "rounds"]
    return f"{said} over kvsieve's in the same round:\n\n{markdown(head, lines)}"


def weights_measured(one: Evidence) -> str:
    """Return what was measured of weights in blocks, without the parts that were not."""
    parts = weights_stored(), weights_table(), weights_identical(), weights_scores(one), weights_large()
    return "\n\n".join(part for part in parts if part) or "Not measured."


def weights_stored() -> str:
    """Times and memory of a checkpoint in 16 bits, as stored and expanded to float32 (benchmarks/speed/stored.py)."""
    file = RESULTS / "weights_stored.json"
    if not file.exists():
        return ""
    report = json.loads(file.read_text())
    lines = []
    for length, found in report["lengths"].items():
        for form in ("stored", "expanded"):
            row = found["summary"][form]
            cells = [f"{int(length):,}", form, f"{row['ttft_s']:.2f}", f"{1000 * row['tpot_s']:.0f}"]
            ratios = [f"{found['summary']['ratio'][name]:.2f}" for name in ("ttft_s", "tpot_s", "peak_bytes")]
            lines.append([*cells, f"{row['peak_bytes'] / MIB:,.0f}", *(ratios if form == "stored" else [""] * 3)])
    head = ["tokens", "weights", "first token, s", "per token, ms", "memory, MiB"]
    head += ["stored over expanded: first token", "per token", "memory"]
    where = f"{report['environment']['processor']}, {report['threads']} threads"
    said = f"{described(report['model'])} in float32 on {where}"
    return f"{said} (`python benchmarks/speed/stored.py`):\n\n{markdown(head, lines)}"


def weights_table() -> str:
    """Times and memory of GGUF files by engine and length (benchmarks/speed/weights.py)."""
    file = RESULTS / "weights_speed.json"
    if not file.exists():
        return ""
    report = json.loads(file.read_text())
    lines = []
    for kind, found in report["files"].items():
        for row in sorted(found["summary"], key=lambda row: (row["tokens"], list(ENGINES).index(row["engine"]))):
            cells = [
                f"{row['tokens']:,}",
                kind,
                ENGINES[row["engine"]],
                f"{row['ttft_s']:.1f}",
                f"{1000 * row['tpot_s']:.0f}",
            ]
            cells.append(f"{row['peak_bytes'] / MIB:,.0f}" if "peak_bytes" in row else "")
            for name in ("ttft_s", "tpot_s", "peak_bytes"):
                blocks = row["engine"] == "blocks" or f"{name}_blocks" not in row
                cells.append("" if blocks else f"{row[f'{name}_blocks']:.2f}")
            lines.append(cells)
    head = ["tokens", "file", "engine", "first token, s", "per token, ms", "memory, MiB"]
    head += ["blocks over it: first token", "per token", "memory"]
    stamp = report["environments"][-1]
    rounds = min(row["rounds"] for found in report["files"].values() for row in found["summary"])
    said = f"GGUF files of {report['model']} on {stamp['processor']}, {report['threads']} threads: medians of"
    said = f"{said} {rounds} rounds; memory is the resident peak of the process, mapped pages included"
    return f"{said} (`python benchmarks/speed/weights.py`):\n\n{markdown(head, lines)}"


def weights_identical() -> str:
    """The count of answers that blocks have changed (benchmarks/answers/identical_weights.py)."""
    file = RESULTS / "weights_identical.json"
    if not file.exists():
        return ""
    rows = json.loads(file.read_text())["rows"].values()
    cases = ", ".join(f"{row['prompts']} under `{row['case']}`" for row in rows)
    tokens, differing = sum(row["tokens"] for row in rows), sum(len(row["differences"]) for row in rows)
    return (
        f"Greedy answers in float32 from blocks and from expanded weights, {cases}: {tokens:,} tokens. "
        f"Answers that differ: {differing} (`python benchmarks/answers/identical_weights.py`)."
    )


def weights_scores(one: Evidence) -> str:
    """Mean scores of the same prompts on weights in blocks and on expanded ones, in bfloat16 (`make weights`)."""
    folders = [one.folder / f"weights_{name}" for name in ("blocks", "expanded")]
    scores = []
    for folder in folders:
        keys = ((row["label"], row["task"], row["sample"], row["score"]) for row in samples_of(folder))
        scores.append({(label, task, sample): score for label, task, sample, score in keys})
    lines = []
    for label in dict.fromkeys(label for label, *_ in scores[0]):
        for name, wanted in (("RULER", ("needle", "ruler")), ("L-Eval", ("leval",))):
            both = [key for key in scores[0] if key in scores[1] and key[0] == label and key[1].startswith(wanted)]
            if both:
                means = [f"{100 * sum(found[key] for key in both) / len(both):.1f}" for found in scores]
                same = sum(scores[0][key] == scores[1][key] for key in both)
                lines.append([f"`{label}`", name, str(len(both)), *means, str(same)])
    head = ["method", "prompts of", "prompts", "score in blocks", "expanded", "equal scores"]
    return markdown(head, lines) if lines else ""


def weights_large() -> str:
    """Memory of a file of 7 billion weights on a limited address space (benchmarks/soak/large_file.py)."""
    file = RESULTS / "weights_large.json"
    if not file.exists():
        return ""
    found = json.loads(file.read_text())
    size, limit, peak = (found[f"{name}_bytes"] / 1e9 for name in ("file", "limit", "peak"))
    beyond = peak / size - found["kv_bytes"] / found["file_bytes"]
    return (
        f"A file of {size:.1f} GB with the shapes of Mistral-7B, on {limit:.0f} GB of address space: a prompt of "
        f"{found['prompt']} tokens takes {peak:.2f} GB at the peak, {beyond:.2f} times the file besides its KV "
        "(`python benchmarks/soak/large_file.py`)."
    )


def profiles_table() -> str:
    """What calibration found on each of the models that has a shipped profile."""
    found = [load_profile(name) for name in shipped_profiles()]
    found = [each for each in found if each.fingerprint.name in MODELS]
    rows: dict[str, list[str]] = {}
    for profile in found:
        pooling, tsp, asl = (profile.measured[part] for part in ("pooling", "tsp", "asl"))
        layers, at = tsp["layers"], tsp["layers"].index(tsp["layer"])
        middle = (
            layers.index(profile.fingerprint.layers // 2 - 1) if profile.fingerprint.layers // 2 - 1 in layers else None
        )
        cells = {
            "pooling": f"window {pooling['window']}, kernel `{pooling['kernel']}`, {pooling['pooling']}",
            "KL at 20%": f"{pooling['kl']:.3f}",
            **{
                f"{each['task']}, right from": each["from"] or "nowhere"
                for each in profile.measured["answers"]["prompts"]
            },
            "TSP layer": f"{tsp['layer']} of {profile.fingerprint.layers}: KL {tsp['kl'][at]:.3f}",
            "FastKV's middle layer": "" if middle is None else f"{layers[middle]}: KL {tsp['kl'][middle]:.2f}",
            "ASL": f"first {asl['first']}, tau {asl['tau']:g}",
            "made at": f"{profile.environment['kvsieve']}, {profile.environment['commit']}",
        }
        for name, cell in cells.items():
            rows.setdefault(name, [""] * len(found))[found.index(profile)] = cell
    head = ["", *(each.fingerprint.name for each in found)]
    return markdown(head, [[name, *cells] for name, cells in rows.items()])


# Pictures


def by_ratio(scores: dict[str, tuple[float, float, int]]) -> dict[str, dict[str, float]]:
    """Scores of labels such as "snapkv 1/8" by method and ratio; full KV's under an empty one."""
    out: dict[str, dict[str, float]] = {}
    for label, (score, _, _) in scores.items():
        method, _, part = label.partition(" ")
        out.setdefault(method, {})[part] = score
    return out


def pictures(found: list[Evidence]) -> dict[str, list[Panel]]:
    """Panels of each picture."""
    out: dict[str, list[Panel]] = {"bytes": [], "hidden": [], "conversations": [], "long": [], "speed": []}
    for one in found:
        for name in ("ruler", "documents"):
            if name in one.sets:
                out["bytes"].append(_of_bytes(one, name))
        if "hidden" in one.sets:
            out["hidden"].append(_bars(one, one.sets["hidden"].found, ("10%", "25%")))
        out["conversations"] += _conversations(one)
        out["long"] += _long(one)
        out["speed"] += _speeds(one)
    return {**out, **({"glance": glance} if (glance := [*_glance()]) else {})}


def _glance() -> Iterator[Panel]:
    """A panel for each question mode, scores over the entries stored, or read where all are stored."""
    for one in (one for one in glances() if one.points):
        series: Points = {}
        shares = is_of_shares(one)
        for (method, budget), point in one.points.items():
            x = point.stored if point.read is None or point.stored < 99 else point.read
            if shares or budget != OWN:
                series.setdefault(method, []).append((x if shares else float(budget), point.share))
        title = f"question {one.question}" if shares else "long answers"
        below = "KV stored (readers: read), % of full KV" if shares else "entries"
        yield LabelledPanel(f"{title}, {one.prompts} prompts", below, "score, % of full KV's", series)


def _of_bytes(one: Evidence, name: str) -> Panel:
    series: Points = {}
    for (method, budget), each in one.sets[name].found.items():
        if budget is not None and method in METHODS:
            series.setdefault(method, []).append((each.stored, each.share))
    return Panel(f"{one.sets[name].title}\n{one.name}", "KV stored, % of full KV", "score, % of full KV's", series)


def _bars(one: Evidence, found: dict[tuple[str, str | None], Any], budgets: tuple[str, ...]) -> Panel:
    methods = [each for each in METHODS if (each, budgets[0]) in found]
    series = {m: [(at, found[m, budget].share) for at, budget in enumerate(budgets)] for m in methods}
    title = f"the question hidden, {one.sets['hidden'].prompts} questions about documents\n{one.name}"
    return Panel(title, "KV entries kept (rocketkv-mt: read a token)", "score, % of full KV's", series, bars=budgets)


def _conversations(one: Evidence) -> Iterator[Panel]:
    for part, title in (("multiturn", "four questions in turn"), ("shared", "four copies of one context")):
        scores = by_ratio(one.scores("rocketkv", part))
        if scores:
            full, ratios = scores.pop("full")[""], sorted({each for mine in scores.values() for each in mine if each})
            series = {method: [(at, mine[each]) for at, each in enumerate(ratios)] for method, mine in scores.items()}
            series["full"] = [(at, full) for at in range(len(ratios))]
            yield Panel(
                f"{title}\n{one.name}",
                "KV entries read a token (snapkv: kept)",
                "answers right, %",
                series,
                bars=tuple(ratios),
            )


def _long(one: Evidence) -> Iterator[Panel]:
    """A panel for each length that parts were measured at."""
    by: dict[int, Points] = {}
    for part in ("grid", "attention", "abstract"):
        series = by.setdefault(one.main_length("lagkv", part), {})
        for label, (right, stored, _) in one.scores("lagkv", part, "partial").items():
            method = label.partition(",")[0] if "," in label else label.rpartition(" ")[0]
            name = re.sub(r"^(?:lag|lagkv) (\d+)$", r"lagkv, lag \1", method)
            if name.startswith("lagkv, ") or name in ("snapkv", "h2o"):
                series.setdefault(name, []).append((stored, right))
    for length, series in sorted(by.items()):
        if series:
            title = f"64 digits in {length:,} tokens\n{one.name}"
            yield Panel(title, "KV stored, % of full KV", "digits right, %", series)


def _speeds(one: Evidence) -> Iterator[Panel]:
    for quantity, title, y in (("ttft_s", "time to first token", "s"), ("tpot_s", "time per token", "ms")):
        series: Points = {}
        for length, speed in one.speeds.items():
            for label, row in speed["summary"].items():
                value = row[quantity]["median"] * (1000 if y == "ms" else 1)
                series.setdefault(label.partition(":")[0], []).append((length, value))
        if series:
            yield Panel(f"{title}\n{one.name}", "prompt tokens", y, series, places=tuple(one.speeds))


def gains(one: Evidence) -> str:
    """Return the README's sentences about answers and times."""
    found = sentences(one)
    return f"{found['bytes']} {found['speed']}"


def captions(one: Evidence) -> dict[str, str]:
    """Each picture with its sentence."""
    return {name: f"![{SHOWS[name]}](pictures/{name}.png)\n\n{text}" for name, text in sentences(one).items()}


def sentences(one: Evidence) -> dict[str, str]:
    """Return a sentence about each picture."""
    turns, digits = by_ratio(one.scores("rocketkv", "multiturn")), one.scores("lagkv", "attention", "partial")
    lag_right, lag_stored, _ = one.scores("lagkv", "grid", "partial")["lag 1024, 4x"]
    longest = max(one.speeds)
    return {
        "bytes": "A tenth of the KV cache costs `snapkv` nothing measurable on generated tasks of 8K tokens "
        f"({kept(one, 'ruler', 'snapkv', '10%')} of full KV's score). On real documents it costs about a quarter of "
        f"the score ({kept(one, 'documents', 'snapkv', '10%')}).",
        "hidden": "Here the context is compressed before its question is known. `kvzip` at 25% keeps "
        f"{kept(one, 'hidden', 'kvzip', '25%')} of full KV's score, `snapkv` {kept(one, 'hidden', 'snapkv', '25%')}.",
        "conversations": "Over four turns `rocketkv-mt` evicts nothing, reads 1/32 of the entries, and answers "
        f"{turns['rocketkv-mt']['1/32']:.0f}% (full KV {turns['full']['']:.0f}%). `snapkv` evicts entries that the "
        f"first question did not need, and answers {turns['snapkv']['1/32']:.0f}%.",
        "long": f"The answer copies 64 digits. `snapkv` gets {digits['snapkv 4x'][0]:.0f}% of them right with "
        f"{digits['snapkv 4x'][1]:.0f}% of the entries, `h2o` {digits['h2o 4x'][0]:.0f}%. `lagkv` needs a long lag, "
        f"which stores more: {lag_right:.0f}% with {lag_stored:.0f}% of the entries.",
        "speed": f"At {longest:,} tokens on two CPU cores kvsieve's full KV takes "
        f"{ratio(one, longest, 'full', 'ttft_s', 'transformers')} of transformers' time to the first token and "
        f"{ratio(one, longest, 'full', 'tpot_s', 'transformers')} of its time per token. `snapkv` at 10% takes "
        f"{ratio(one, longest, 'snapkv', 'tpot_s', 'full')} of full KV's time per token.",
    }


def digest(panels: list[Panel]) -> str:
    """Return a hash of the panels' data; it is written into the PNG, so that a test finds an old picture."""
    # Processors may sum in another order.
    rounded = re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.4g}", repr(panels))
    return hashlib.sha256(rounded.encode()).hexdigest()


def draw(panels: list[Panel], file: Path) -> None:
    """Panels side by side as PNG."""
    with style():
        figure = new_figure(4.6 * len(panels), 3.6)
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            labelled = isinstance(panel, LabelledPanel)
            lines = _draw_labelled if labelled else _draw_lines
            plot: Callable[[Axes, Panel], None] = _draw_bars if panel.bars else lines
            plot(axes, panel)
            axes.set(xlabel=panel.x, ylabel=panel.y)
            axes.set_title(panel.title, fontsize=8)
            if labelled:
                continue
            columns = min(4, len(panel.series))
            axes.legend(fontsize=7, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.2), columnspacing=1)
        figure.savefig(file, dpi=PNG_DPI * 0.7, metadata={"Software": None, "Description": digest(panels)})


def _draw_lines(axes: Axes, panel: Panel) -> None:
    for number, (name, points) in enumerate(panel.series.items()):
        look = {"color": COLOURS.get(name), "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        axes.plot(*zip(*sorted(points), strict=True), label=name, **look)
    axes.set_ylim(0)
    if panel.places:
        axes.set_xticks(panel.places, [f"{x:,}" for x in panel.places])


def _draw_labelled(axes: Axes, panel: Panel) -> None:
    """Lines of the baselines in colour, of the others in grey; names beside the last points, moved off each other."""
    ends = []
    for name, points in panel.series.items():
        colour = COLOURS.get(name, "#b0b0b0")
        axes.plot(*zip(*sorted(points), strict=True), color=colour, marker="o", markersize=2.5, linewidth=0.8)
        ends.append((*max(points), name, colour))
    axes.set_ylim(0)
    top, right = axes.get_ylim()[1], max(x for x, *_ in ends)
    step = top / max(40, len(ends) + 2)
    low = -step
    for _, y, name, colour in sorted(ends, key=lambda end: end[1]):
        low = max(low + step, y)
        axes.annotate(name, (1.03 * right, low), fontsize=4.5, color=colour if colour != "#b0b0b0" else "#444444")
    axes.set_ylim(0, max(top, low + step))
    axes.set_xlim(0, 1.35 * right)


def _draw_bars(axes: Axes, panel: Panel) -> None:
    width = 0.8 / len(panel.series)
    for number, (name, points) in enumerate(panel.series.items()):
        places, values = zip(*points, strict=True)
        axes.bar([x + number * width for x in places], values, 0.9 * width, label=name, color=COLOURS.get(name))
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(panel.bars))], panel.bars)


if __name__ == "__main__":
    main()
