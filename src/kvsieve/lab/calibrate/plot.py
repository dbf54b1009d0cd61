"""Plot of a calibration: the distance of dropping tokens from full context, by layer (FastKV, figure 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsieve.errors import InputError
from kvsieve.lab.calibrate.distances import KL_BOUND
from kvsieve.planning.profiles import Profile
from kvsieve.report.plot_style import Look, looks, new_figure, png_bytes, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LAST = "mean over prompts"
_WORST = "worst prompt"
_KL = "answer"


def distances_png(profile: Profile) -> bytes:
    """Return the plot as PNG; InputError for a profile without the part "tsp", KvsieveError without matplotlib."""
    if "tsp" not in profile.measured:
        raise InputError("the profile holds no distances to draw; calibrate with --parts tsp")
    with style():
        return png_bytes(draw(profile))


def draw(profile: Profile) -> Figure:
    """Draw the last hidden state's distance and the answer's KL over the layers, with the chosen layer marked."""
    found = profile.measured["tsp"]
    layers = found["layers"]
    look = looks([_LAST, _WORST, _KL])
    figure = new_figure(7.6, 3.3)
    left, right = figure.subplots(1, 2)
    _line(left, layers, found["relative_worst"], look[_WORST], _WORST)
    _line(left, layers, found["relative"], look[_LAST], _LAST)
    _line(right, layers, found["kl"], look[_KL], _KL)
    settled = found["rule"] == "settled"
    for axes, title, bound in (
        (left, "last prompt token's hidden state:\nsquared distance / squared norm", found["tolerance"]),
        (right, "answer's tokens after the first:\nKL to full context (nats)", KL_BOUND),
    ):
        axes.set_yscale("log")
        axes.set_title(title)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.axvline(found["layer"], color="#222222", linewidth=1.0, linestyle=(0, (5, 3)), zorder=1.5)
        if settled and bound > 0:
            axes.axhline(bound, color="#8a8a8a", linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=1.5)
    left.annotate(
        f"layer {found['layer']}", (found["layer"], 0), (-4, 5), xycoords=left.get_xaxis_transform(),
        textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip
    left.legend(loc="upper right" if found["layer"] < layers[-1] / 2 else "lower left", bbox_to_anchor=(0, 0.08))
    figure.supxlabel(
        f"layer after which {found['rate']} of the tokens go on (window {found['window']}, {found['pooling']} pooling "
        f"of {found['kernel']})",
        fontsize=9,
    )
    if profile.name:
        figure.suptitle(profile.name, fontsize=9)
    return figure


def _line(axes: Axes, layers: list[int], values: list[float], look: Look, label: str) -> None:
    # A distance of zero has no place on a logarithmic axis.
    drawn = [value or float("nan") for value in values]
    axes.plot(layers, drawn, color=look.colour, marker=look.marker, markersize=3.5, linewidth=1.3, label=label)
