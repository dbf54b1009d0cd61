"""Plot of an advice: loss against memory and time, with the frontier and the chosen plan marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsieve.lab.advise.choose import Candidate, on_frontier
from kvsieve.lab.advise.run import Advice
from kvsieve.report.plot_style import Look, add_legend, looks, new_figure, png_bytes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A loss of zero has no place on a logarithmic axis.
_LEAST = 1e-5


def frontier_png(advice: Advice) -> bytes:
    with style():
        return png_bytes(draw(advice))


def draw(advice: Advice) -> Figure:
    """Draw a panel over the KV bytes at the context, and one over the time per token if measured."""
    shown = [candidate for candidate in advice.candidates if candidate.acted]
    timed = all(candidate.tpot_ratio is not None for candidate in shown)
    labels = list(dict.fromkeys(candidate.setting.label for candidate in shown))
    look = looks(labels)
    figure = new_figure(9.6 if timed else 6.4, 3.6)
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    _panel(panels[0], advice, shown, look, [candidate.kv_bytes / 2**20 for candidate in shown])
    panels[0].set_xlabel(f"KV of one prompt of {advice.context} tokens (MiB, computed)")
    if timed:
        _panel(panels[1], advice, shown, look, [candidate.tpot_ratio or 1.0 for candidate in shown])
        panels[1].set_xlabel(f"time per token at {advice.measured_at} tokens, ratio to full KV")
    panels[0].set_ylabel(f"KL to full KV at {advice.measured_at} tokens\n(nats per token of the answer)")
    handles = [panels[0].plot([], [], look[name].marker, color=look[name].colour)[0] for name in labels]
    add_legend(figure, handles, labels)
    return figure


def _panel(axes: Axes, advice: Advice, shown: list[Candidate], look: dict[str, Look], across: list[float]) -> None:
    axes.set_yscale("log")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    best = sorted(
        (x, max(one.loss, _LEAST)) for x, one in zip(across, shown, strict=True) if on_frontier(one, advice.candidates)
    )
    axes.plot([x for x, _ in best], [y for _, y in best], color="#bbbbbb", linewidth=1.0, zorder=1)
    chosen = None if advice.choice is None else advice.choice.plan.setting
    for x, one in zip(across, shown, strict=True):
        point = look[one.setting.label]
        axes.plot(x, max(one.loss, _LEAST), point.marker, color=point.colour, markersize=5, zorder=2)
        if one.setting == chosen:
            axes.plot(x, max(one.loss, _LEAST), "o", color="none", markeredgecolor="#222222", markersize=12, zorder=3)
    if advice.limits.loss is not None:
        axes.axhline(advice.limits.loss, color="#8a8a8a", linewidth=0.9, linestyle=(0, (1, 1.5)))
