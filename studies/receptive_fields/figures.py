"""The tables and figures of README.md, from the runs of results.json; study.py prints and draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from study import BOTH, FAST, MULTIPLES, SEEN, STARTS, Condition, center_errors, in_order

from malleable.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    VERMILLION,
    kernels,
    legend,
    new_figure,
    save,
    styled,
)
from malleable.reports.tables import markdown

FIGURES = Path(__file__).with_name("figures")
NEAR, FACTOR = 0.25, 1.25  # what has arrived: centers within so many cells, the temperature within this factor
SHOWN = 0  # the seed whose paths are drawn
KNOWN, LEARNED = BOTH
NAMES = {KNOWN: "weights known", LEARNED: "weights learned"}
COLOURS = {KNOWN: BLUE, LEARNED: VERMILLION}

Run = dict[str, Any]
Runs = dict[Condition, list[Run]]


def by_condition(runs: Sequence[Run]) -> Runs:
    """Condition → its runs, by seed."""
    found: Runs = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        found.setdefault(Condition(**run["condition"]), []).append(run)
    return found


def kernel_error(run: Run) -> float:
    return center_errors(run["path"][-1]["centers"], run["teacher"]["centers"])[0]


def border_error(run: Run) -> float:
    return center_errors(run["path"][-1]["centers"], run["teacher"]["centers"])[1]


def warmth(run: Run) -> float:
    """The student's temperature as a multiple of the teacher's."""
    return float(run["path"][-1]["temperature"] / run["teacher"]["temperature"])


def coldest(run: Run) -> float:
    """The lowest temperature on the way, as a multiple of the teacher's."""
    return float(min(point["temperature"] for point in run["path"]) / run["teacher"]["temperature"])


def scale_error(run: Run) -> float:
    found, wanted = run["path"][-1]["scales"], run["teacher"]["scales"]
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


def left_order(run: Run) -> bool:
    """Whether two centers had changed places at any of the points of the path."""
    return not all(in_order(point["centers"]) for point in run["path"])


def count(truths: Sequence[bool]) -> str:
    return f"{sum(truths)} of {len(truths)}"


def middle(values: Sequence[float]) -> str:
    return f"{median(values):.2f}"


def errors(runs: Sequence[Run], key: str = "error") -> str:
    """Test errors in thousandths of the answers' variance: the median, and all between which the seeds lie."""
    values = [1000 * run[key] for run in runs]
    mid, low, high = (f"{v:.3g}" if v >= 0.001 else "< 0.001" for v in (median(values), min(values), max(values)))
    return f"{mid} ({low} … {high})"


ARRIVAL = ["kernels arrive", "borders arrive", "temperature arrives", "worst kernel, cells", "worst border, cells"]
ARRIVAL += ["temperature / teacher's", "error × 1000"]


def arrival(runs: Sequence[Run]) -> list[str]:
    """The cells below ``ARRIVAL``: how many seeds arrive, and medians over them."""
    inner, outer, warm = ([measure(run) for run in runs] for measure in (kernel_error, border_error, warmth))
    return [
        count([value <= NEAR for value in inner]),
        count([value <= NEAR for value in outer]),
        count([1 / FACTOR <= value <= FACTOR for value in warm]),
        *map(middle, (inner, outer, warm)),
        errors(runs),
    ]


def tables(found: Runs) -> list[str]:
    """The table of each question, as Markdown."""
    starts = [["weights", "start", *ARRIVAL, "worst scale"]]
    for base in BOTH:
        for name, start in STARTS.items():
            if runs := found.get(replace(base, **start)):
                scale = middle([scale_error(run) for run in runs]) if base is KNOWN else "–"
                starts.append([base.weights, name, *arrival(runs), scale])
    rates = [["weights", "optimizer", "receptive_field_lr", *ARRIVAL, "coldest / teacher's", "left order"]]
    for base in (*BOTH, replace(LEARNED, optimizer="sgd")):
        for multiple in MULTIPLES:
            if runs := found.get(replace(base, multiple=multiple)):
                cold, crossed = f"{min(map(coldest, runs)):.2f}", count([left_order(run) for run in runs])
                rates.append([base.weights, base.optimizer, f"{multiple:g}", *arrival(runs), cold, crossed])
    depths = [["weights", "the student's depth", "invalid", *ARRIVAL, "teacher's own error × 1000"]]
    for base in BOTH:
        for sensor, invalid in SEEN:
            runs = found[replace(base, sensor=sensor, invalid=invalid)]
            shown = invalid if "holes" in sensor else "–"
            depths.append([base.weights, sensor, shown, *arrival(runs), errors(runs, "error_of_teacher")])
    numbers = [["kernels of the student", "receptive field", "error × 1000"]]
    for k in range(6):
        for fixed in (False, True):
            if runs := found.get(replace(LEARNED, kernels=k, fixed=fixed)):
                field = "–" if k == 0 else "as it started" if fixed else "learned"
                numbers.append([f"{k}" if k else "plain convolution", field, errors(runs)])
    orders = [["weights", "receptive_field_lr", "centers", *ARRIVAL, "left order"]]
    for base in (*BOTH, replace(LEARNED, equal=True)):
        weights = f"{base.weights}, equal kernels" if base.equal else base.weights
        for multiple in FAST:
            for ordered in (False, True):
                if runs := found.get(replace(base, multiple=multiple, ordered=ordered)):
                    kind = "kept in order" if ordered else "free"
                    crossed = count([left_order(run) for run in runs])
                    orders.append([weights, f"{multiple:g}", kind, *arrival(runs), crossed])
    return [markdown(cells) for cells in (starts, rates, depths, numbers, orders)]


def draw_path(panel: Any, run: Run, what: str = "centers") -> None:
    """One student's centers or temperature by step; dotted: the teacher's."""
    steps, values = ([point[key] for point in run["path"]] for key in ("step", what))
    if what == "temperature":
        panel.plot(steps, values, color=INK)
        panel.axhline(run["teacher"]["temperature"], color=INK, linestyle=":", linewidth=1.2)
        return
    for border in (0, -1):
        panel.plot(steps, [point[border] for point in values], color=GREY, linestyle="--", linewidth=1.3)
        panel.axhline(run["teacher"]["centers"][border], color=GREY, linestyle=":", linewidth=1.2)
    wanted = run["teacher"]["centers"][1:-1]
    for k, kernel in enumerate(kernels(wanted), 1):
        panel.plot(steps, [point[k] for point in values], color=kernel.colour)
        panel.axhline(wanted[k - 1], color=kernel.colour, linestyle=":", linewidth=1.2)


def path_legend(figure: Figure, run: Run) -> None:
    """The sides that the teacher's kernels look to, the borders, and what is dotted."""
    shown = sorted(kernels(run["teacher"]["centers"][1:-1]))
    handles = [Line2D([], [], color=kernel.colour) for kernel in shown]
    handles += [Line2D([], [], color=GREY, linestyle=dashes) for dashes in ("--", ":")]
    legend(figure, handles, [*(kernel.label for kernel in shown), "borders", "the teacher's"])


@styled
def draw_starts(found: Runs) -> Figure:
    """Question 1: the way from each start, with known and with learned weights."""
    figure, panels = new_figure(12.0, 5.0, 2, len(STARTS), sharey=True, sharex="row")
    for row, base in zip(panels, BOTH, strict=True):
        for panel, (name, start) in zip(row, STARTS.items(), strict=True):
            if runs := found.get(replace(base, **start)):
                draw_path(panel, runs[SHOWN])
                panel.set_title(name.replace(", ", ",\n"))
                panel.set_xlabel("step")
            else:
                panel.set_axis_off()
        row[0].set_ylabel(f"{NAMES[base]}\ncenters (cells)")
    path_legend(figure, found[LEARNED][SHOWN])
    return figure


@styled
def draw_rates(found: Runs) -> Figure:
    """Question 2: the way at each multiple, with learned weights; centers above, temperature below."""
    chosen = {f"AdamW\n{multiple:g} ×": replace(LEARNED, multiple=multiple) for multiple in MULTIPLES}
    chosen |= {f"SGD\n{multiple:g} ×": replace(LEARNED, multiple=multiple, optimizer="sgd") for multiple in FAST}
    figure, panels = new_figure(13.0, 5.2, 2, len(chosen), sharex=True, sharey="row")
    for (above, below), (title, condition) in zip(panels.T, chosen.items(), strict=True):
        run = found[condition][SHOWN]
        draw_path(above, run)
        draw_path(below, run, "temperature")
        above.set_title(title)
        below.set_xlabel("step")
    panels[0, 0].set(ylabel="centers (cells)", ylim=(-6, 6))
    panels[1, 0].set(ylabel="temperature", ylim=(0, 3))
    path_legend(figure, found[LEARNED][SHOWN])
    return figure


def dots(panel: Any, places: Sequence[float], groups: Sequence[Sequence[float]], colour: str, kind: str = "o") -> None:
    """Every seed a dot, and the median a bar."""
    for place, values in zip(places, groups, strict=True):
        shifts = np.linspace(-0.07, 0.07, len(values)) if len(values) > 1 else [0.0]
        panel.plot(place + np.array(shifts), values, kind, color=colour, markersize=4, alpha=0.75)
        panel.plot([place - 0.13, place + 0.13], [median(values)] * 2, color=colour, linewidth=2.2)


def logarithmic(panel: Any) -> None:
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("")


@styled
def draw_depths(found: Runs) -> Figure:
    """Question 3: what noise and holes leave of the answers, of the temperature and of the centers."""
    figure, (panels,) = new_figure(12.0, 4.2, columns=3)
    measures = {"test error": lambda run: run["error"], "temperature / teacher's": warmth,
                "worst kernel (cells)": kernel_error}  # fmt: skip
    for panel, (title, measure) in zip(panels, measures.items(), strict=True):
        for shift, base in ((-0.2, KNOWN), (0.2, LEARNED)):
            groups = [found[replace(base, sensor=sensor, invalid=invalid)] for sensor, invalid in SEEN]
            places = [place + shift for place in range(len(SEEN))]
            dots(panel, places, [[measure(run) for run in runs] for runs in groups], COLOURS[base])
            if title == "test error" and base is KNOWN:
                own = [[run["error_of_teacher"] for run in runs] for runs in groups]
                dots(panel, range(1, len(SEEN)), own[1:], GREY, "s")
        names = [
            sensor if invalid == "same" and "holes" not in sensor else f"noise,\nholes:\n{invalid}"
            for sensor, invalid in SEEN
        ]
        panel.set_xticks(range(len(SEEN)), names, fontsize=8)
        panel.set_title(title)
    logarithmic(panels[0])
    panels[1].axhline(1.0, color=INK, linestyle=":", linewidth=1.2)
    handles = [Line2D([], [], color=c, marker=m) for c, m in ((BLUE, "o"), (VERMILLION, "o"), (GREY, "s"))]
    legend(figure, handles, [*NAMES.values(), "the teacher itself with that depth"], width=2.6)
    return figure


@styled
def draw_numbers(found: Runs) -> Figure:
    """Question 4: the error that is left, by the student's number of kernels."""
    figure, ((panel,),) = new_figure(6.5, 4.0)
    plain = found[replace(LEARNED, kernels=0)]
    dots(panel, [0.0], [[run["error"] for run in plain]], GREY)
    for shift, fixed, colour in ((-0.12, False, VERMILLION), (0.12, True, GREEN)):
        groups = {k: found.get(replace(LEARNED, kernels=k, fixed=fixed)) for k in range(1, 6)}
        there = {k + shift: [run["error"] for run in runs] for k, runs in groups.items() if runs}
        dots(panel, list(there), list(there.values()), colour)
    logarithmic(panel)
    panel.set_xticks(range(6), ["plain", *map(str, range(1, 6))])
    panel.set(xlabel="kernels of the student (the teacher has 3)", ylabel="test error")
    handles = [Line2D([], [], color=colour, marker="o") for colour in (VERMILLION, GREEN, GREY)]
    legend(
        figure, handles, ["receptive field learned", "receptive field as it started", "plain convolution"], width=2.1
    )
    return figure


@styled
def draw_orders(found: Runs) -> Figure:
    """Question 5: free centers beside centers that are kept in order. A cross left the order on its way."""
    figure, panels = new_figure(10.0, 5.2, 2, 2, sharex=True)
    for column, base in zip(panels.T, BOTH, strict=True):
        for panel, (title, measure) in zip(
            column, {"test error": lambda run: run["error"], "worst kernel (cells)": kernel_error}.items(), strict=True
        ):
            for shift, ordered, colour in ((-0.15, False, VERMILLION), (0.15, True, GREEN)):
                for place, multiple in enumerate(FAST):
                    runs = found[replace(base, multiple=multiple, ordered=ordered)]
                    dots(panel, [place + shift], [[measure(run) for run in runs]], colour)
                    lost = [measure(run) for run in runs if left_order(run)]
                    panel.plot([place + shift - 0.2] * len(lost), lost, "x", color=INK, markersize=6)
            logarithmic(panel)
            panel.set_ylabel(title)
        column[0].set_title(NAMES[base])
        column[1].set_xticks(range(len(FAST)), [f"{multiple:g} ×" for multiple in FAST])
        column[1].set_xlabel("receptive_field_lr")
    handles = [Line2D([], [], color=colour, marker="o") for colour in (VERMILLION, GREEN)]
    handles.append(Line2D([], [], color=INK, marker="x", linestyle=""))
    legend(figure, handles, ["free", "kept in order", "left the order on its way"], width=2.2)
    return figure


def draw_all(runs: Sequence[Run]) -> None:
    """Print the tables and write the figures."""
    found = by_condition(runs)
    for table in tables(found):
        print(table)
    drawings = {"starts": draw_starts, "rates": draw_rates, "depths": draw_depths, "numbers": draw_numbers}
    for name, draw in (drawings | {"orders": draw_orders}).items():
        save(draw(found), str(FIGURES / f"{name}.png"), "png")
