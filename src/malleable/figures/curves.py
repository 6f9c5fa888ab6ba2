"""Lines and bars show what receptive fields are, what they do, and how a run went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from malleable.figures.history import CURVES, FieldPath
from malleable.figures.style import DASHES, GREY, INK, LINES, Array, headline, kernels, legend, new_figure, styled


@dataclass(frozen=True)
class Assigning:
    """Holds the functions h (K + 2, D) and g (K, D) over relative depth differences d (D,), and centers (K + 2,)."""

    d: Array
    h: Array
    g: Array
    centers: Array
    temperature: float


@dataclass(frozen=True)
class Field:
    """Holds g (K, D) of neighbours ``metres`` (D,) behind the center pixel, and centers (K,) in grid cells."""

    metres: Array
    g: Array
    centers: Array


@styled
def assigning_functions(states: Mapping[str, Assigning]) -> Figure:
    """Draw h_k above, g_k below (paper, Fig. 2 and appendix 3), in a column for each title and state."""
    figure, panels = new_figure(max(5.0, 2.2 * len(states)), 4.6, 2, len(states), sharex="col", sharey="row")
    for (above, below), (title, state) in zip(panels.T, states.items(), strict=True):
        inner = state.centers[1:-1]
        for h, dashes in ((state.h[0], "--"), (state.h[-1], ":")):
            above.plot(state.d, h, color=GREY, linestyle=dashes, linewidth=1.3)
        for kernel, h, g, a in zip(kernels(inner), state.h[1:-1], state.g, inner, strict=True):
            above.plot(state.d, h, color=kernel.colour)
            below.plot(state.d, g, color=kernel.colour)
            below.axvline(a, color=kernel.colour, linewidth=0.8, linestyle=":")
        above.set_title(f"{title}\nt = {state.temperature:.3g}")
        below.set_xlabel("← behind\u2003$d$\u2003in front →", parse_math=True)
        below.set_xlim(state.d[0], state.d[-1])
    coldest = min(state.temperature for state in states.values())
    panels[0, 0].set_ylabel("$h_k$", parse_math=True)
    panels[0, 0].set_ylim(-4 / coldest, 2.5 / coldest)
    panels[1, 0].set_ylabel("$g_k$", parse_math=True)
    panels[1, 0].set_ylim(0, 1.05)
    inners = [state.centers[1:-1] for state in states.values()]
    _kernel_legend(figure, inners, {"beyond, behind": "--", "beyond, in front": ":"})
    return figure


@styled
def receptive_fields(methods: Mapping[str, Mapping[str, Field]], depth: float, focal: float) -> Figure:
    """Draw depth receptive fields in metres (paper, Fig. 4 and appendix 4): a row a method, a column a stage (res2 …).

    As in the paper, every panel is scaled to the height of its highest kernel. ``depth`` (metres) is that of the center
    pixel, ``focal`` is in pixels.
    """
    stages = sorted({stage for fields in methods.values() for stage in fields})
    width, height = max(5.0, 0.6 + 2.4 * len(stages)), 1.0 + 1.45 * len(methods)
    figure, panels = new_figure(width, height, len(methods), len(stages), sharex="col", sharey=True)
    for row, (method, fields) in zip(panels, methods.items(), strict=True):
        for panel, stage in zip(row, stages, strict=True):
            if stage not in fields:
                panel.set_axis_off()
                continue
            field, height = fields[stage], np.nanmax(fields[stage].g)
            for kernel, g in zip(kernels(field.centers), field.g / height, strict=True):
                panel.plot(field.metres, g, color=kernel.colour)
                panel.fill_between(field.metres, g, where=g > 0.002, color=kernel.colour, alpha=0.15, linewidth=0)
            panel.set_xlim(field.metres[0], field.metres[-1])
        row[0].set_ylabel(fill(method, 16))
    panels[0, 0].set(ylim=(0, 1.05), yticks=[0, 1])
    for panel, stage in zip(panels[0], stages, strict=True):
        panel.set_title(stage)
    for panel in panels[-1]:
        panel.set_xlabel("← in front\u2003metres\u2003behind →")
        panel.locator_params(axis="x", nbins=5, prune="both")
    headline(figure, f"Depth receptive fields at {depth:g} m, focal length {focal:.4g} px (height scaled to 1)")
    _kernel_legend(figure, (field.centers for fields in methods.values() for field in fields.values()), {})
    return figure


@styled
def rebalancing(layers: Mapping[str, tuple[Array, Array, Array]], counted: str) -> Figure:
    """Draw the part of all assigned pixels that each kernel has, before and after rebalancing (paper, Fig. 3).

    Args:
        layers: title → (shares before, shares after, centers), each (K,).
        counted: what was counted over, for the title.
    """
    most = max(len(centers) for _, _, centers in layers.values())
    width = max(5.0, max(2.6, 0.62 * most) * len(layers))
    figure, (panels,) = new_figure(width, 3.4, columns=len(layers), sharey=True)
    for panel, (title, (before, after, centers)) in zip(panels, layers.items(), strict=True):
        order = np.argsort(centers)
        shown = kernels(centers[order])
        colours = [kernel.colour for kernel in shown]
        for shift, shares, alpha in ((-0.2, before, 0.4), (0.2, after, 1.0)):
            bars = panel.bar(np.arange(len(order)) + shift, 100 * shares[order], 0.38, alpha=alpha, color=colours)
            panel.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
        panel.set_xticks(range(len(order)), [kernel.label.replace(" ", "\n") for kernel in shown])
        panel.set_title(title)
        panel.grid(visible=False, axis="x")
    panels[0].set_ylabel("share of pixels (%)")
    panels[0].margins(y=0.1)
    headline(figure, f"Pixels per kernel, counted over {counted}")
    legend(figure, [Patch(color=GREY, alpha=0.4), Patch(color=GREY)],
           ["before rebalancing ($g_k$)", "after ($s_k g_k$)"], width=2.3, formulas=True)  # fmt: skip
    return figure


@styled
def training(runs: Mapping[str, Mapping[str, tuple[Array, Array]]]) -> Figure:
    """Draw how runs went: shown name → of ``CURVES`` those there are → (steps, values), both (S,)."""
    kinds = [kind for kind in CURVES if any(kind in curves for curves in runs.values())]
    height = 3.2 + 0.22 * (len(runs) > 1) * -(-len(runs) // 3)
    width = max(5.0, 3.6 * len(kinds), 3.1 * min(len(runs), 3))  # the legend has three columns
    figure, (panels,) = new_figure(width, height, columns=len(kinds), sharex=True)
    lines: dict[str, Any] = {}
    for panel, kind in zip(panels, kinds, strict=True):
        for number, (name, curves) in enumerate(runs.items()):
            if kind in curves:
                steps, values = curves[kind]
                marker = "o" if kind == "miou" or len(steps) == 1 else None
                (lines[name],) = panel.plot(steps, values, color=LINES[number % len(LINES)], marker=marker,
                    linestyle=DASHES[number // len(LINES) % len(DASHES)], markersize=4)  # fmt: skip
        panel.set(title=CURVES[kind], xlabel="step")
        panel.set_ylim(bottom=0)
        panel.set_xlim(left=0)
        panel.locator_params(axis="x", nbins=5)
    if len(lines) > 1:
        legend(figure, list(lines.values()), list(lines), width=3.0)
    return figure


@styled
def receptive_field_path(layers: Mapping[str, FieldPath]) -> Figure:
    """Draw how centers, temperature and scales moved in training, in a column for each title and layer."""
    figure, panels = new_figure(max(5.0, 2.5 * len(layers)), 6.2, 3, len(layers), sharex=True, sharey="row")
    for (centers, temperature, scales), (title, path) in zip(panels.T, layers.items(), strict=True):
        for border in (path.centers[:, 0], path.centers[:, -1]):
            centers.plot(path.steps, border, color=GREY, linestyle="--", linewidth=1.3)
        inner = path.centers[:, 1:-1]
        for kernel, a, s in zip(kernels(inner[-1]), inner.T, path.scales.T, strict=True):
            centers.plot(path.steps, a, color=kernel.colour)
            scales.plot(path.steps, s, color=kernel.colour)
        temperature.plot(path.steps, path.temperature, color=INK)
        centers.set_title(title)
        scales.set_xlabel("step")
        scales.set_xlim(left=0)
        scales.locator_params(axis="x", nbins=4)
    for row, label in zip(panels, ("centers $a_k$", "temperature $t$", "scales $s_k$"), strict=True):
        row[0].set_ylabel(label, parse_math=True)
    _kernel_legend(figure, (path.centers[-1, 1:-1] for path in layers.values()), {"borders": "--"})
    return figure


def _kernel_legend(figure: Figure, centers: Iterable[Array], others: Mapping[str, Any]) -> None:
    """Add a legend of all kernels that occur, from behind to in front, and of the grey ``others``: label → dashes."""
    shown = sorted({kernel for layer in centers for kernel in kernels(layer)})
    handles = [Line2D([], [], color=kernel.colour) for kernel in shown]
    handles += [Line2D([], [], color=GREY, linestyle=dashes) for dashes in others.values()]
    legend(figure, handles, [*(kernel.label for kernel in shown), *others])
