"""Common style of all pictures: colours and markers, wrapped names, and saving. matplotlib's object API only."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsieve.errors import KvsieveError
from kvsieve.report.labels import FULL, budget_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours that stand out on white; 6 colours and 11 markers give 66 different pairs.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "svg.hashsalt": "kvsieve",  # makes bytes reproducible
}
PNG_DPI = 144


@dataclass(frozen=True)
class Look:
    """Colour and marker of a label, the same in all pictures."""

    colour: str
    marker: str


def require_matplotlib() -> None:
    """Raise KvsieveError without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise KvsieveError("pictures need matplotlib, which is missing; run `pip install 'kvsieve[eval]'`") from error


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Isolate drawing from the caller's matplotlib settings, and restore them afterwards."""
    require_matplotlib()
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def looks(labels: Sequence[str]) -> dict[str, Look]:
    chosen = zip((label for label in labels if label != FULL), itertools.count(), strict=False)
    found = {label: Look(_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)]) for label, i in chosen}
    return {FULL: Look("#222222", "*"), **found}


def wrap(text: str, width: int = 26, lines: int = 4) -> str:
    return textwrap.fill(text, width, max_lines=lines, placeholder=" …", break_on_hyphens=False)


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    padding = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06, wspace=0.03, hspace=0.04)
    return Figure(figsize=(width, height), layout=padding)


def legend_height(names: Sequence[str]) -> float:
    return 0.3 + sum(0.155 * (wrap(name).count("\n") + 1) + 0.05 for name in names)


def add_legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    figure.legend(
        handles, [wrap(name) for name in names], loc="outside right upper", handlelength=2.2, labelspacing=0.6
    )


def budget_places(budgets: Sequence[str | None]) -> dict[str, float]:
    """Return positions on an axis: logarithmic if all are shares or all are entries, otherwise one after another."""
    limits = sorted((budget for budget in budgets if budget is not None), key=budget_order)
    orders = [budget_order(budget) for budget in limits]
    if len({order[0] for order in orders}) == 1 and orders[0][0] < 3 and all(order[1] > 0 for order in orders):
        places = [math.log2(order[1]) for order in orders]
        gaps = [after - before for before, after in itertools.pairwise(places)]
        if not gaps or min(gaps) > 0.08 * (places[-1] - places[0]):
            return dict(zip(limits, places, strict=True))
    return {budget: float(place) for place, budget in enumerate(limits)}


def set_budget_axis(axes: Axes, places: dict[str, float]) -> None:
    axes.set_xticks(list(places.values()), list(places))
    first = min(places.values())
    last = max(places.values())
    margin = 0.12 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)


def svg_bytes(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def png_bytes(figure: Figure) -> bytes:
    """Return a PNG in 256 colours: a third of the size, with no visible difference."""
    from PIL import Image

    drawn = io.BytesIO()
    buffer = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=PNG_DPI)
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(buffer, format="png", optimize=True, dpi=(PNG_DPI, PNG_DPI))
    return buffer.getvalue()
