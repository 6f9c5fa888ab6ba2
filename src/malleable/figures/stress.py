"""The figure of what networks reach when depth is not what it was in training."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure

from malleable.data.faults import STRESSES, Stress
from malleable.figures.style import DASHES, LINES, legend, new_figure, styled

_AXES = {
    "scale": ("depth × a factor", 1.0),
    "holes": ("part of the depth unknown", 0.0),
    "shift": ("pixels of shift", 0.0),
    "focal": ("focal length × a factor", 1.0),
}
"""Families with a strength → what their axis says, and the strength of no fault."""


@styled
def stress(rows: Mapping[str, tuple[float, Mapping[str, float]]]) -> Figure:
    """Draw mIoU against the strength of each fault, a line a row, and the faults without a strength beside them.

    Args:
        rows: shown name → mIoU without a fault, and by the name of the fault.
    """
    measured = [stress for stress in STRESSES if any(stress.name in found for _, found in rows.values())]
    others = [stress for stress in measured if stress.family not in _AXES]
    axes = {family: axis for family, axis in _AXES.items() if family in {stress.family for stress in measured}}
    height = 2 if axes else 1  # in rows of panels
    figure, panels = new_figure(11.5, 3.1 * height + 0.22 * -(-len(rows) // 3), height, max(len(axes), 1))
    for place, (family, (label, none)) in enumerate(axes.items()):
        panel = panels[0, place]
        for number, (clean, found) in enumerate(rows.values()):
            points = sorted([(none, clean), *((s.strength, found[s.name]) for s in _of(family) if s.name in found)])
            panel.plot(
                [strength for strength, _ in points], [miou for _, miou in points], markersize=4, **_look(number),
                linestyle=DASHES[number // len(LINES) % len(DASHES)],
            )  # fmt: skip
        if family == "scale":
            panel.set_xscale("log")
            panel.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        panel.set(xlabel=label, ylabel="" if place else "mIoU (%)")
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])  # no marker is cut
    wide = panels[-1, 0].get_gridspec()[-1, :]
    for panel in panels[-1]:
        panel.remove()
    panel = figure.add_subplot(wide)
    for number, (clean, found) in enumerate(rows.values()):
        values = [clean, *(found.get(stress.name, float("nan")) for stress in others)]
        panel.plot(range(len(values)), values, markersize=7, linestyle="none", **_look(number))
    panel.set_xticks(range(len(others) + 1), ["no fault", *(fill(s.name, 18) for s in others)], fontsize=8.5)
    panel.set(ylabel="mIoU (%)")
    panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
    legend(figure, figure.axes[0].get_lines(), list(rows), width=3.0)
    return figure


def _look(number: int) -> dict[str, Any]:
    """Give a row its colour; where colours come again markers are hollow, which is to them what dashes are to lines."""
    colour = LINES[number % len(LINES)]
    return {"color": colour, "marker": "o", "markerfacecolor": colour if number < len(LINES) else "white"}


def _of(family: str) -> list[Stress]:
    return [stress for stress in STRESSES if stress.family == family]
