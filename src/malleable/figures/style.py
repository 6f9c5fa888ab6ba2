"""All figures look alike: colours that the colour-blind can tell apart, fonts, sizes, and how files are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from textwrap import fill
from typing import IO, Any, NamedTuple, ParamSpec

import numpy as np
import numpy.typing as npt
from matplotlib import style
from matplotlib.figure import Figure

Array = npt.NDArray[Any]
P = ParamSpec("P")

# Okabe and Ito's colours.
BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
INK, GREY, PALE = "#222222", "#7F7F7F", "#E8E8E8"
LINES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, INK)
"""The colours of things without a meaning of their own, runs for example."""
DASHES = ("-", "--", ":", "-.")

BEHIND, SAME, FRONT = "behind", "same depth", "in front"
_SIDES = {BEHIND: (BLUE, SKY, "#003B5C"), SAME: (GREEN,), FRONT: (VERMILLION, ORANGE, "#6B2F00")}
"""The colours of each side's kernels, that of the one nearest to the center pixel first."""

_STYLE: Any = {  # every version of matplotlib types its keys in its own way
    "axes.titlesize": 11,
    "legend.fontsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": PALE,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.07,
    "image.interpolation": "nearest",
    "text.parse_math": False,  # names of classes and runs are no formulas
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "malleable",  # the same figure is the same file
}


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Let ``draw`` draw in this style, whatever the process has set for its own figures."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with style.context(_STYLE, after_reset=True):
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once: every file of the figure is the same picture
        return figure

    return drawn


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, sharex: Any = False, sharey: Any = False
) -> tuple[Figure, Any]:
    """Make a figure of ``width`` × ``height`` inches that belongs to no window, and its panels (rows, columns)."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)


def save(figure: Figure, target: str | IO[bytes], kind: str) -> None:
    """Write ``figure`` as ``"png"`` or ``"svg"``. The same figure gives the same bytes."""
    metadata = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}[kind]
    with style.context(_STYLE, after_reset=True):
        figure.savefig(target, format=kind, dpi=150, metadata=metadata)


def sides(centers: Sequence[float] | Array) -> list[str]:
    """Tell where each of K kernels looks, by the sign of its center (K,): positive is in front (paper, Eq. 1).

    A kernel is at the same depth if its center is within half a grid cell of 0, and every other more than twice as far.
    """
    distances = np.abs(centers)
    first, second = np.sort([*distances, np.inf])[:2]
    middle = first if first < min(0.5, second / 2) else 0.0
    return [
        SAME if distance <= middle else FRONT if a > 0 else BEHIND
        for a, distance in zip(centers, distances, strict=True)
    ]


class Kernel(NamedTuple):
    """Says how figures show a kernel; ``place`` counts from behind (negative) to in front, 0 is at the same depth."""

    place: int
    label: str
    colour: str


def kernels(centers: Sequence[float] | Array) -> list[Kernel]:
    """Show each of K kernels by the side it looks to, and by how many kernels of that side are nearer to 0."""
    found, distances = sides(centers), np.abs(centers)
    shown = []
    for k, side in enumerate(found):
        members = sorted((j for j, other in enumerate(found) if other == side), key=lambda j: distances[j])
        rank, colours = members.index(k), _SIDES[side]
        place = {BEHIND: -1, SAME: 0, FRONT: 1}[side] * (rank + 1)
        label = side if rank == 0 else f"further {side}" if rank == 1 else f"further {side} {rank}"
        shown.append(Kernel(place, label, colours[rank % len(colours)]))
    return shown


def headline(figure: Figure, text: str) -> None:
    """Put a title over all panels, in as many lines as it needs."""
    figure.suptitle(fill(text, int(11 * figure.get_figwidth())), fontsize=11)


def legend(
    figure: Figure, handles: Sequence[Any], labels: Sequence[str], width: float = 1.45, formulas: bool = False
) -> None:
    """Put a legend below all panels, in columns of ``width`` inches. ``formulas`` may then stand between dollars."""
    columns = max(1, min(len(labels), int(figure.get_figwidth() / width)))
    for text in figure.legend(handles, labels, loc="outside lower center", ncols=columns).get_texts():
        text.set_parse_math(formulas)
