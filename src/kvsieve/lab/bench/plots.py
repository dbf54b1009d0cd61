"""Plots of a report of `kvsieve bench`: latency by context length, with the machine's limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsieve.lab.bench.contenders import BASELINE, is_peer
from kvsieve.report.plot_style import Look, add_legend, legend_height, looks, new_figure, png_bytes, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEGEND_WIDTH = 2.7
_LIMIT = "machine's limit"


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write latency.png (bars: prompt and answer, per length) and scaling.png (lines over the length) into `folder`.

    Raises KvsieveError without matplotlib, OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with style():
        for name, make in (("latency.png", latency), ("scaling.png", scaling)):
            file = folder / name
            file.write_bytes(png_bytes(make(report)))
            files.append(file)
    return files


def latency(report: dict[str, Any]) -> Figure:
    """Draw a panel per length: stacked seconds to the first token and for all later ones, each with its limit."""
    from matplotlib.patches import Patch

    names = _names(report)
    lengths = sorted(report["lengths"], key=int)
    chosen = _looks(names)
    after = report["new_tokens"] - 1
    figure = new_figure(2.6 + 2.1 * len(lengths) + 1.6, max(2.4, 0.9 + 0.3 * len(names)))
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for panel, length in zip(panels, lengths, strict=True):
        summary = report["lengths"][length]["summary"]
        for place, name in enumerate(names):
            row = summary[name]
            prompt = row["ttft_s"]["median"]
            answer = after * row["tpot_s"]["median"]
            colour = chosen[name].colour
            # The peer's are hatched: colours are few.
            how: dict[str, Any] = {"height": 0.62, "color": colour, "edgecolor": "white", "linewidth": 0}
            how["hatch"] = "///" if is_peer(name) else None
            panel.barh(place, prompt, **how)
            panel.barh(place, answer, left=prompt, alpha=0.45, **how)
            if "ttft_limit_s" in row:
                limit = row["ttft_limit_s"] + after * row["tpot_limit_s"]
                panel.plot([limit, limit], [place - 0.36, place + 0.36], color="black", linewidth=1.4)
        panel.set_title(f"{int(length):,} tokens")
        panel.set_yticks(range(len(names)), [_marked(name, report) for name in names])
        panel.set_xlim(left=0)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    panels[0].invert_yaxis()
    figure.supxlabel(f"seconds, median of {report['rounds']} rounds{_rows(report)}", fontsize=9)
    handles: list[Any] = [Patch(color="#555555"), Patch(color="#555555", alpha=0.45), _limit_handle("-")]
    add_legend(figure, handles, ["to the first token", f"{after} tokens after it", f"{_LIMIT}, both"])
    return figure


def scaling(report: dict[str, Any]) -> Figure:
    """Draw the time to first token and per later token against the prompt's length; dotted: the limit."""
    names = _names(report)
    lengths = sorted(report["lengths"], key=int)
    chosen = _looks(names)
    legend = [*(_marked(name, report) for name in names), _LIMIT]
    figure = new_figure(2 * 3.1 + _LEGEND_WIDTH, max(3.2, legend_height(legend)))
    panels = figure.subplots(1, 2)
    handles: list[Any] = []
    wanted = (("time to first token (s)", "ttft", 1.0), ("time per token after it (ms)", "tpot", 1e3))
    for panel, (title, quantity, scale) in zip(panels, wanted, strict=True):
        for name in names:
            rows = [report["lengths"][length]["summary"][name] for length in lengths]
            spreads = [row[f"{quantity}_s"] for row in rows]
            middle = [scale * spread["median"] for spread in spreads]
            low = [scale * (spread["median"] - spread["min"]) for spread in spreads]
            high = [scale * (spread["max"] - spread["median"]) for spread in spreads]
            look = chosen[name]
            line = panel.errorbar(
                [int(length) for length in lengths], middle, [low, high], color=look.colour, marker=look.marker,
                markersize=5, linestyle="--" if is_peer(name) else "-", linewidth=1.4, elinewidth=0.7, capsize=1.5,
            )  # fmt: skip
            if panel is panels[0]:
                handles.append(line)
            limits = [scale * row[f"{quantity}_limit_s"] for row in rows if f"{quantity}_limit_s" in row]
            if len(limits) == len(lengths):
                panel.plot([int(length) for length in lengths], limits, color=look.colour, marker="_", linestyle=":")
        panel.set_title(title)
        panel.set_xticks([int(length) for length in lengths], [f"{int(length):,}" for length in lengths])
        panel.set_ylim(bottom=0)
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    figure.supxlabel(f"prompt tokens{_rows(report)}", fontsize=9)
    add_legend(figure, [*handles, _limit_handle(":")], legend)
    return figure


def _names(report: dict[str, Any]) -> list[str]:
    """Return the contenders measured at every length; in a batch, the peer has single rows only."""
    summaries = [entry["summary"] for entry in report["lengths"].values()]
    return [name for name in report["contenders"] if all(summary.get(name, {}).get("ttft_s") for summary in summaries)]


def _looks(names: Sequence[str]) -> Mapping[str, Look]:
    return {**looks([name for name in names if name != BASELINE]), BASELINE: Look("#8a8a8a", "o")}


def _marked(name: str, report: dict[str, Any]) -> str:
    acted = all(entry["summary"][name]["applied"] for entry in report["lengths"].values())
    spaced = name.replace(":", " ", 1).replace(";", ", ").replace(":", ", ")
    return spaced if acted else f"{spaced} (did not act)"


def _rows(report: dict[str, Any]) -> str:
    return f", batch of {report['batch']} unequal rows" if report["batch"] > 1 else ""


def _limit_handle(line: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color="black", linestyle=line, linewidth=1.4)
