"""Pictures show results beside the truth, what each kernel answers, and which neighbours it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from malleable.figures.style import BLUE, GREY, INK, ORANGE, PALE, Array, headline, kernels, legend, new_figure, styled

DEPTH_COLOURS = "cividis"
SIGNED_COLOURS = "PuOr_r"
_IGNORE = 255
_TICKS = np.outer(10.0 ** np.arange(-2, 4), [1, 2, 3, 5]).ravel()


@styled
def qualitative(
    images: Sequence[Array],
    depths: Sequence[Array],
    labels: Sequence[Array],
    predictions: Mapping[str, Sequence[Array]],
    classes: Sequence[str],
    palette: Sequence[Sequence[int]],
) -> Figure:
    """Draw results beside the truth, a row a sample (paper, Fig. 5).

    The last column shows where the last prediction errs; if there are several, compared with the first.

    Args:
        images: (H, W, 3) uint8. depths: (H, W) metres, 0 = unknown. labels: (H, W) class indices, 255 = unlabelled.
        predictions: shown name → (H, W) class indices for every sample.
        classes: names. palette: (red, green, blue) of 0..255 for each.
    """
    titles = ["image", "depth", "ground truth", *predictions, "errors"]
    aspect = max(image.shape[0] / image.shape[1] for image in images)
    width = float(np.clip(11 / len(titles), 1.5, 2.4))
    shown = np.unique(np.concatenate([part.ravel() for parts in (labels, *predictions.values()) for part in parts]))
    errors = _error_entries(list(predictions))
    entries = _class_entries(shown, classes, palette) | errors
    rows = -(-len(entries) // int(width * len(titles) / 1.75))
    height = (width * aspect + 0.08) * len(images) + 0.7 + 0.21 * rows
    figure, panels = new_figure(width * len(titles), height, len(images), len(titles))
    norm = _depth_norm(depths)
    for row, image, depth, label, *answers in zip(panels, images, depths, labels, *predictions.values(), strict=True):
        pictures = [image, _depth_colours(depth, norm), *(_class_colours(part, palette) for part in (label, *answers))]
        for panel, picture in zip(row, [*pictures, _error_colours(label, answers, errors)], strict=True):
            _show(panel, picture)
    for panel, title in zip(panels[0], titles, strict=True):
        panel.set_title(fill(title, int(11 * width)), fontsize=10)
    _depth_bar(figure, norm, list(panels[:, 1]))
    marks = [Patch(facecolor=colour, edgecolor=GREY, linewidth=0.5) for colour in entries.values()]
    legend(figure, marks, list(entries), 1.75)
    return figure


@styled
def feature_maps(
    images: Sequence[Array], parts: Sequence[Array], centers: Array, channels: Sequence[int], layer: str
) -> Figure:
    """Draw what each kernel of a layer adds to chosen channels of its output (paper, appendix 6), and their sum.

    Args:
        images: (H, W, 3) uint8.
        parts: for each image (K, C, h, w), the contribution of every kernel to the C chosen ``channels``.
        centers: (K,), where each kernel looks.
    """
    order = np.argsort(centers)
    many = len(order) > 1
    columns = 1 + len(order) + many
    aspect = max(image.shape[0] / image.shape[1] for image in images)
    width = float(np.clip(11 / columns, 1.5, 2.6))
    rows = [
        (image, maps, channel)
        for image, part in zip(images, parts, strict=True)
        for maps, channel in zip(part[order].swapaxes(0, 1), channels, strict=True)
    ]
    height = (width * aspect + 0.08) * len(rows) + 1.0
    figure, panels = new_figure(width * columns + 0.3, height, len(rows), columns)
    for row, (image, maps, channel) in zip(panels, rows, strict=True):
        _show(row[0], image)
        row[0].set_ylabel(f"channel {channel}")
        drawn = [*maps, *([maps.sum(0)] if many else [])]
        limit = float(np.percentile(np.abs(drawn), 99.5)) or 1.0  # a few outliers would turn all else white
        for panel, one in zip(row[1:], drawn, strict=True):
            _show(panel, one, cmap=SIGNED_COLOURS, vmin=-limit, vmax=limit)
    panels[0, 0].set_title("image")
    for panel, kernel in zip(panels[0, 1:], kernels(centers[order]), strict=False):
        panel.set_title(kernel.label, color=kernel.colour, weight="bold")
    if many:
        panels[0, -1].set_title("sum")
    headline(figure, f"What each kernel of {layer} adds (white is 0, every row has its own scale)")
    bar = figure.colorbar(ScalarMappable(Normalize(-1, 1), SIGNED_COLOURS), ax=panels, location="bottom", shrink=0.4,
                          aspect=30, pad=0.02)  # fmt: skip
    bar.set_ticks([-1, 0, 1], labels=["lowers", "0", "raises"])
    return figure


@dataclass(frozen=True)
class Neighbours:
    """Tells which taps one output pixel of a layer has, and g (K, T) at them.

    ``pixel`` and ``taps`` (T, 2) are (x, y) in the image, ``inside`` (T,) tells which of them lie on the map.
    """

    pixel: tuple[int, int]
    taps: Array
    g: Array
    inside: Array


@styled
def neighbours(image: Array, depth: Array, found: Neighbours, centers: Array, layer: str) -> Figure:
    """Draw over the image which neighbours of a pixel each kernel of a layer takes.

    image: (H, W, 3) uint8; depth: (H, W) metres, 0 = unknown; centers: (K,), where each kernel looks.
    """
    height, width = depth.shape
    pixel, taps, inside = found.pixel, found.taps, found.inside
    reach = max(16, int(1.6 * np.abs(taps - pixel).max()))
    left, right, top, bottom = _around(pixel, reach, width, height)
    apart = min((float(np.abs(tap - pixel).max()) for tap in taps if tuple(tap) != pixel), default=reach)
    order = np.argsort(centers)
    columns = 2 + len(order)
    side = min(2.4, 12 / columns)  # of a panel, in inches
    figure, (panels,) = new_figure(side * columns, side + 1.25, columns=columns)
    area = min(16.0, 0.7 * 72 * side * apart / (2 * reach + 1)) ** 2  # of a full circle, in square points
    rim: Any = [withStroke(linewidth=2.4, foreground="white")]  # seen on dark pictures too
    _show(panels[0], image)
    corner = (left - 0.5, top - 0.5)
    panels[0].add_patch(Rectangle(corner, right - left, bottom - top, fill=False, edgecolor=INK, path_effects=rim))
    panels[0].set_title(f"pixel ({pixel[0]}, {pixel[1]})", pad=9)
    norm = _depth_norm([depth[top:bottom, left:right]])
    _show(panels[1], _depth_colours(depth, norm))
    panels[1].scatter(*taps[inside].T, s=14, color="white", edgecolors=INK, linewidths=0.8)
    panels[1].set_title("depth", pad=9)
    circle: Any = {"facecolors": "none", "edgecolors": INK, "linewidths": 0.8, "path_effects": rim}
    for panel, kernel, g in zip(panels[2:], kernels(centers[order]), found.g[order], strict=True):
        _show(panel, image)
        panel.scatter(*taps[inside].T, s=area, clip_on=False, **circle)
        panel.scatter(*taps[inside].T, s=area * g[inside], clip_on=False, color=kernel.colour, linewidths=0)
        panel.set_title(kernel.label, color=kernel.colour, weight="bold", pad=9)
    for panel in panels[1:]:
        panel.set(xlim=(left - 0.5, right - 0.5), ylim=(bottom - 0.5, top - 0.5))
        panel.plot(*pixel, marker="+", color=INK, markersize=8, markeredgewidth=1, path_effects=rim)
    _depth_bar(figure, norm, list(panels), shrink=0.3)
    for panel in panels:
        panel.set_anchor("N")
    headline(figure, f"Neighbours that each kernel of {layer} takes (a full circle: all of it)")
    return figure


def _around(pixel: tuple[int, int], reach: int, width: int, height: int) -> tuple[int, int, int, int]:
    """Find left, right, top, bottom of a square with ``pixel`` in its middle, unless the image ends there."""
    left, top = (
        int(np.clip(at - reach, 0, max(0, length - 2 * reach - 1)))
        for at, length in zip(pixel, (width, height), strict=True)
    )
    return left, min(width, left + 2 * reach + 1), top, min(height, top + 2 * reach + 1)


def _show(panel: Any, picture: Array, **options: Any) -> None:
    panel.imshow(picture, **options)
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set(visible=True, linewidth=0.5)
    panel.grid(visible=False)


def _depth_norm(depths: Sequence[Array]) -> LogNorm:
    """Scale depth by its logarithm, from the nearest to the farthest known but for the outermost hundredths."""
    known = np.concatenate([depth[np.isfinite(depth) & (depth > 0)] for depth in depths])
    near, far = np.percentile(known, [1, 99]) if known.size else (1.0, 10.0)
    return LogNorm(near, max(far, 1.05 * near), clip=True)


def _depth_colours(depth: Array, norm: Normalize) -> Array:
    """Colour depth: (H, W, 3) of 0..1, unknown depth in white, which is brighter than every known depth."""
    known = np.isfinite(depth) & (depth > 0)
    colours: Array = matplotlib.colormaps[DEPTH_COLOURS](norm(np.where(known, depth, 1.0)))[..., :3]
    colours[~known] = to_rgb("white")
    return colours


def _depth_bar(figure: Figure, norm: Normalize, panels: list[Any], shrink: float = 1.0) -> None:
    """Add a bar below ``panels`` that says which colour is how far, in round metres."""
    assert norm.vmin is not None
    assert norm.vmax is not None
    ticks = [tick for tick in _TICKS if norm.vmin <= tick <= norm.vmax]
    if len(ticks) < 2:
        ticks = [norm.vmin, norm.vmax]
    bar = figure.colorbar(ScalarMappable(norm, DEPTH_COLOURS), ax=panels, location="bottom", shrink=shrink,
                          aspect=14 / shrink, pad=0.03)  # fmt: skip
    bar.set_ticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
    bar.ax.minorticks_off()
    bar.set_label("depth in metres (white: unknown)", fontsize=8.5)


def _class_colours(label: Array, palette: Sequence[Sequence[int]]) -> Array:
    table = np.full((256, 3), np.multiply(255, to_rgb(PALE)), np.uint8)
    table[: len(palette)] = palette
    colours: Array = table[label]
    return colours


def _class_entries(shown: Array, classes: Sequence[str], palette: Sequence[Sequence[int]]) -> dict[str, Any]:
    """List the classes that occur, for the legend: name → colour."""
    entries: dict[str, Any] = {
        name: tuple(np.divide(palette[index], 255)) for index, name in enumerate(classes) if index in shown
    }
    return entries | ({"unlabelled": PALE} if _IGNORE in shown else {})


def _error_entries(names: Sequence[str]) -> dict[str, str]:
    """Say what the error map's colours mean, in the order of its values."""
    if len(names) == 1:
        return {"right": "white", "wrong": ORANGE}
    first, last = names[0], names[-1]
    return {"both right": "white", f"only {last} right": BLUE, f"only {first} right": ORANGE, "both wrong": "#4D4D4D"}


def _error_colours(label: Array, answers: Sequence[Array], meanings: Mapping[str, str]) -> Array:
    """Colour errors: (H, W, 3) of 0..1; pixels without a label are as in the label's picture."""
    wrong = answers[-1] != label
    if len(answers) > 1:
        wrong = (answers[0] != label) + 2 * wrong.astype(int)
    colours: Array = np.array([to_rgb(colour) for colour in meanings.values()])[wrong.astype(int)]
    colours[label == _IGNORE] = to_rgb(PALE)
    return colours
