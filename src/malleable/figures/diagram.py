"""The diagram of a network shows its stages, their rates, and the layers that see depth (paper, appendix 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from malleable.figures.style import BLUE, GREEN, GREY, INK, PALE, VERMILLION, new_figure, styled

_WIDTH, _GAP, _HEIGHT = 1.05, 0.19, 1.0  # of a box, in inches
_ABOVE, _BELOW = 1.45, -1.15  # where merging block and replaced layers stand


@dataclass(frozen=True)
class Stage:
    """Describes a stage of the backbone; ``replaced`` are the lines to write about its depth-seeing layer, if any."""

    name: str
    stride: int
    channels: int
    replaced: tuple[str, ...] = ()


@styled
def network(
    title: str,
    stem: int | None,
    stages: Sequence[Stage],
    aspp: Sequence[int],
    merge: bool,
    width: int,
    classes: int,
    depth: bool = True,
) -> Figure:
    """Draw stem, stages, ASPP and decoder as boxes, with strides; layers that see depth hang below their stage.

    Args:
        stem: stride of the stem's output, None if not known.
        aspp: dilation rates of the ASPP.
        merge: the decoder gets all stages through the merging block instead of the first one.
        width: channels of the decoder.
        depth: the network sees depth, through its layers or as an input.
    """
    boxes = [
        ("image", "RGB + depth,\nfocal length" if depth else "RGB"),
        ("stem", "" if stem is None else f"1/{stem}"),
        *((stage.name, f"1/{stage.stride}\n{stage.channels} channels") for stage in stages),
        ("ASPP", f"rates\n{', '.join(map(str, aspp))}\n+ pooling"),
        ("decoder", f"1/{stages[0].stride}\n{width} channels"),
        ("labels", f"1/1\n{classes} classes"),
    ]
    lines = max((len(stage.replaced) for stage in stages), default=0)
    length = len(boxes) * (_WIDTH + _GAP)
    low, high = -0.6 if not lines else _BELOW + 0.2 - 0.17 * lines, 2.1 if merge else 1.35
    figure, ((axes,),) = new_figure(length, high - low + 0.3)
    axes.set(xlim=(-_WIDTH / 2 - _GAP / 2, length - _WIDTH / 2 - _GAP / 2), ylim=(low, high), aspect="equal")
    axes.set_axis_off()
    axes.set_title(title)
    at = [number * (_WIDTH + _GAP) for number in range(len(boxes))]
    first, last, decoder = 2, 1 + len(stages), 3 + len(stages)
    seeing = {stage.name for stage in stages if stage.replaced}
    for x, (name, about) in zip(at, boxes, strict=True):
        _box(axes, x, 0, _WIDTH, _HEIGHT, VERMILLION if name in seeing else GREY)
        axes.text(x, 0.3 if about else 0, name, ha="center", va="center", weight="bold")
        axes.text(x, -0.12, about, ha="center", va="center", fontsize=8.5)
    for left, right in pairwise(at):
        _arrow(axes, (left + _WIDTH / 2, 0), (right - _WIDTH / 2, 0))
    for x, stage in zip(at[first:], stages, strict=False):
        if stage.replaced:
            _arrow(axes, (x, _BELOW + 0.28), (x, -_HEIGHT / 2), VERMILLION)
            axes.text(x, _BELOW + 0.25, "\n".join(stage.replaced), ha="center", va="top", fontsize=8.5, color=INK)
    top = _HEIGHT / 2
    if merge:
        middle = (at[first] + at[last]) / 2
        _box(axes, middle, _ABOVE, at[last] - at[first] + _WIDTH, 0.6, GREEN)
        axes.text(middle, _ABOVE, "multi-stage merging block", ha="center", va="center", weight="bold")
        for x in at[first : last + 1]:
            _arrow(axes, (x, top), (x, _ABOVE - 0.3), GREEN)
        axes.plot([at[last] + _WIDTH / 2, at[decoder]], [_ABOVE, _ABOVE], color=GREEN, linewidth=1.5)
        _arrow(axes, (at[decoder], _ABOVE), (at[decoder], top), GREEN)
    else:
        axes.plot([at[first], at[first], at[decoder]], [top, 1.05, 1.05], color=BLUE, linewidth=1.5)
        axes.text((at[first] + at[decoder]) / 2, 1.1, f"skip from {stages[0].name}", ha="center", va="bottom")
        _arrow(axes, (at[decoder], 1.05), (at[decoder], top), BLUE)
    return figure


def _box(axes: Any, x: float, y: float, width: float, height: float, edge: str) -> None:
    """Draw a box centered on (x, y)."""
    shape = "round,pad=0,rounding_size=0.08"
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(corner, width, height, shape, facecolor=PALE, edgecolor=edge, linewidth=1.6))


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, color=colour, linewidth=1.3, **style))
