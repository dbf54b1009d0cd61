"""Draw the README's picture and print its table of times, memory and answers, from the committed measurements.

    python benchmarks/overview.py [--out docs/overview.png]

Times and memory are those of `make bench` (benchmarks/results/bench/bench.json) at its longest prompt, answers those of
benchmarks/first_answers.py. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsieve.report.plot_style import new_figure, png_bytes, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "overview.png"
MIB = 2**20
# What it is called here, in bench.json and in first_answers.json (None: its answers were not asked for).
ROWS = (
    ("transformers", "transformers", None),
    ("kvsieve, full KV", "full", "full"),
    ("FastKV 10%, calibrated", "fastkv:budget=10%:profile=smollm2-135m-instruct", "fastkv calibrated, 10%"),
    ("RocketKV, 256 entries", "rocketkv:budget=256", "rocketkv 256"),
    ("SnapKV 10%, kernel 7", "snapkv:budget=10%", "snapkv 10%"),
    ("FastKV 10%, layer 14", "fastkv:tsp_layer=14:tsp_rate=0.2:budget=10%", "fastkv layer 14, 20%, 10%"),
    ("kvpress, SnapKV 10%", "kvpress snapkv:budget=10%", None),
)
DRAWN = ROWS[:5]
GREY, BLUE, GREEN = "#8c8c8c", "#0072B2", "#009E73"


def load() -> tuple[dict[str, Any], dict[str, Any]]:
    """The two reports."""
    bench, answers = RESULTS / "bench" / "bench.json", RESULTS / "first_answers.json"
    return json.loads(bench.read_text()), json.loads(answers.read_text())


def longest(bench: dict[str, Any]) -> dict[str, Any]:
    """Each contender's medians at the longest prompt."""
    summary = bench["lengths"][max(bench["lengths"], key=int)]["summary"]
    # Older reports have semicolons between parameters.
    return {label.replace(";", ":"): row for label, row in summary.items()}


def table(bench: dict[str, Any], answers: dict[str, Any]) -> str:
    """Markdown. Ratios are medians of those within each round."""
    lines = [
        "| | time to first token | / transformers | / own full KV | time per token | / transformers | / own full KV "
        "| KV held | number found |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for label, timed, asked in ROWS:
        row = longest(bench)[timed]
        cells = [label, f"{row['ttft_s']['median']:.2f} s", *_ratios(row, "ttft_s")]
        cells += [f"{1000 * row['tpot_s']['median']:.1f} ms", *_ratios(row, "tpot_s")]
        cells += [f"{row['kv_bytes']['median'] / MIB:.1f} MiB", answers["right"][asked] if asked else "not run"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratios(row: dict[str, Any], quantity: str) -> list[str]:
    return [f"{row['ratios'][other][quantity]['median']:.2f}" for other in ("transformers", "full")]


def panels(bench: dict[str, Any], answers: dict[str, Any]) -> list[tuple[str, list[float | None], str]]:
    """What is drawn: a title, a value per setting (None: not measured), and how values are written."""
    rows = [longest(bench)[timed] for _, timed, _ in DRAWN]
    samples = len(answers["samples"]["full"])
    return [
        ("time to first token (s)", [row["ttft_s"]["median"] for row in rows], ".1f"),
        ("time per token (ms)", [1000 * row["tpot_s"]["median"] for row in rows], ".0f"),
        ("KV cache (MiB)", [row["kv_bytes"]["median"] / MIB for row in rows], ".0f"),
        (
            f"hidden number found (of {samples})",
            [
                None if asked is None else sum(each["right"] for each in answers["samples"][asked])
                for *_, asked in DRAWN
            ],
            ".0f",
        ),
    ]


def written(values: list[float | None], form: str) -> list[str]:
    return ["not run" if value is None else format(value, form) for value in values]


def alternative_text(bench: dict[str, Any], answers: dict[str, Any]) -> str:
    """The picture in words."""
    told = [f"{title}: {', '.join(written(values, form))}" for title, values, form in panels(bench, answers)]
    return f"Bars for {'; '.join(label for label, *_ in DRAWN)}. {'; '.join(told)}."


def draw(bench: dict[str, Any], answers: dict[str, Any]) -> Figure:
    """Four panels of bars, one bar per setting; the last is how often the answer is right."""
    wanted = panels(bench, answers)
    figure = new_figure(9.4, 2.5)
    axes = figure.subplots(1, len(wanted), sharey=True)
    for panel, (title, values, form) in zip(axes, wanted, strict=True):
        for place, (value, text) in enumerate(zip(values, written(values, form), strict=True)):
            colour = GREEN if panel is axes[-1] else BLUE if place else GREY
            panel.barh(place, value or 0, 0.64, color=colour)
            panel.annotate(text, (value or 0, place), (3, 0), textcoords="offset points", va="center", fontsize=8.5)
        panel.set_title(title, loc="left")
        panel.set_xlim(0, 1.18 * max(value for value in values if value is not None))
        panel.set_xticks([])
        panel.set_yticks(range(len(DRAWN)), [label for label, *_ in DRAWN])
        panel.tick_params(axis="y", length=0)
        panel.spines["bottom"].set_visible(False)
    axes[0].invert_yaxis()
    figure.supxlabel(
        f"{bench['model']}, bfloat16, {bench['environment']['cores']} CPU cores ({bench['environment']['processor']}): "
        f"a prompt of {int(max(bench['lengths'], key=int)):,} tokens, medians of {bench['rounds']} rounds; "
        f"the number is hidden in {answers['tokens']:,} tokens",
        fontsize=8,
        color="#444444",
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    reports = load()
    with style():
        arguments.out.write_bytes(png_bytes(draw(*reports)))
    print(f"![{alternative_text(*reports)}](docs/{arguments.out.name})\n")
    print(table(*reports))


if __name__ == "__main__":
    main()
