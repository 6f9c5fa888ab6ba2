"""The sections of a report, each a list of HTML from groups of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from malleable.data.sample import SampleDataset
from malleable.figures.run import comparison_figures, run_figures
from malleable.models.cost import Cost
from malleable.reports.outcome import Group, Run
from malleable.reports.page import Column, Html, bars, code, element, join, paragraph, picture, small, table
from malleable.reports.paper import PaperRow, paper_row
from malleable.reports.statistics import Average, decimal, shown, shown_p
from malleable.runs.config import Config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ABOUT = {
    "training": ("Training", "Loss and validation figures by step."),
    "receptive_fields": (
        "Depth receptive fields",
        "How much of a neighbour each kernel takes, by how many metres it lies in front of or behind the pixel.",
    ),
    "qualitative": ("Examples", "Colour, depth, labels and predictions; the error map shows which pixels are wrong."),
    "assigning_functions": (
        "Assigning functions",
        "h and g of every kernel, by relative depth difference, at initialisation and after training.",
    ),
    "rebalancing": ("Pixels per kernel", "The share that each kernel takes before and after rebalancing."),
    "feature_maps": ("Feature maps", "What each kernel of a layer answers to: in front, same depth, behind."),
    "neighbours": ("Neighbours", "Which neighbours of a pixel each kernel takes."),
    "network": ("Network", "Its stages with their rates; layers that see depth are marked."),
    "receptive_field_path": ("Path of the receptive fields", "Centres and temperature of every layer by step."),
}
"""Name of a figure → its title, and what it shows."""


def results(groups: Sequence[Group], baseline: Group, colours: Mapping[str, str]) -> list[Html]:
    """mIoU as bars, then everything as a table, beside the paper where it has the method."""
    scores = {group.name: (average.mean, shown(average)) if (average := group.miou) else None for group in groups}
    papers = [
        paper_row(group.config, bool(group.measured) and len(group.measured[0].protocol.scales) > 1) for group in groups
    ]
    gains = [None if group is baseline else group.ahead(baseline) for group in groups]
    columns = [
        Column("mIoU", [_counted(group.miou) for group in groups]),
        Column("difference", [_counted(gain, "+") for gain in gains]),
        Column("p", [shown_p(gain) or "–" for gain in gains]),
        Column("pixel accuracy", [shown(group.average(lambda each: each.pixel_accuracy)) for group in groups]),
        Column("mean accuracy", [shown(group.average(lambda each: each.mean_accuracy)) for group in groups]),
        Column("mIoU in the paper", [_paper(row) for row in papers], words=True),
        Column("measured on", [join(group.setting or "–", small(_source(group))) for group in groups], words=True),
        Column("trained", [join(group.config.model.backbone, small(group.runs[0].budget)) for group in groups], True),
        Column("parameters, M", [_number(value) for value in _costs(groups, _parameters)]),
        Column("multiply-adds, G", [_number(value) for value in _costs(groups, _multiply_adds)]),
        Column("images/s", [_number(group.images_per_second, 1) for group in groups]),
    ]
    paired = all(group.seeds & baseline.seeds for group, gain in zip(groups, gains, strict=True) if gain)
    notes = [f"In percent. Differences are to {baseline.name}{', seed by seed' if paired else ''}."]
    if any(average.spread is not None for group in groups if (average := group.miou)):
        notes.append("± is the sample standard deviation over n runs.")
    if any(shown_p(gain) for gain in gains):
        notes.append(
            "p is how often a difference at least this large would arise if there were none (two-sided paired t-test, "
            "not corrected for the number of rows)."
        )
    else:
        columns = [column for column in columns if column.head != "p"]
    if any(papers):
        notes.append("The paper's figures are for orientation: what they were reached with stands beside them.")
    else:
        columns = [column for column in columns if column.head != "mIoU in the paper"]
    names = Column("run", [join(group.name, *(small(note) for note in _notes(group))) for group in groups])
    return [
        bars(scores, colours, named=True),
        paragraph(" ".join(notes), kind="note"),
        table("All results", names, *columns),
    ]


def _paper(row: PaperRow | None) -> object:
    if row is None:
        return "–"
    return join(f"{row.miou:.2f}", small(f"pixel accuracy {row.pixel_accuracy:.2f}"), small(row.label))


def _notes(group: Group) -> list[str]:
    """What to know about a group besides its figures."""
    notes = []
    steps = group.config.train.steps
    unfinished = [run for run in group.runs if not run.finished]
    if unfinished and len(group.runs) == 1:
        notes.append(f"unfinished, step {unfinished[0].step} of {steps}")
    elif unfinished:
        seeds = ", ".join(f"seed {run.config.train.seed} at step {run.step}" for run in unfinished)
        notes.append(f"unfinished: {seeds} of {steps}")
    left_out = len(group.runs) - len(group.measured)
    if group.measured and left_out:
        notes.append(f"{left_out} of {len(group.runs)} runs left out: no result, or measured otherwise")
    return notes


def _source(group: Group) -> str:
    if not group.measured:
        return "no results.json and no validation"
    steps = f"step {group.measured[0].step}" if group.measured[0].step is not None else ""
    return ", ".join(filter(None, [" and ".join(dict.fromkeys(each.source for each in group.measured)), steps]))


def comparison(groups: Sequence[Group]) -> list[Html]:
    """The first run of each group, drawn together."""
    first = {group.name: group.runs[0] for group in groups}
    datasets = {_data(run): run.dataset for run in first.values()}
    alike = len(datasets) == 1

    def draw(dataset: SampleDataset | None) -> dict[str, Figure]:
        figures = comparison_figures({name: run.folder for name, run in first.items()}, dataset)
        return {name: figure for name, figure in figures.items() if alike or name != "qualitative"}

    content = _drawn(draw, next(iter(datasets.values())) if alike else "the runs were trained on different data")
    if any(len(group.runs) > 1 for group in groups):
        content.insert(0, paragraph("Of several seeds, the first is drawn.", kind="note"))
    return content


def _drawn(draw: Callable[[SampleDataset | None], Mapping[str, Figure]], dataset: SampleDataset | str) -> list[Html]:
    """Figures, and a sentence for what could not be drawn."""
    missing = [f"Figures that need the data are left out: {dataset}"] if isinstance(dataset, str) else []
    try:
        figures = draw(None if isinstance(dataset, str) else dataset)
    except (ValueError, OSError, RuntimeError) as error:
        figures, missing = {}, [f"The figures could not be drawn: {error}"]
    pictures = [picture(figure, *_ABOUT.get(name, (name, ""))) for name, figure in figures.items()]
    if not pictures and not missing:
        missing = ["There is nothing to draw: neither metrics.jsonl nor a checkpoint was found"]
    return [*pictures, *(paragraph(f"{sentence}.", kind="note") for sentence in missing)]


def classes(groups: Sequence[Group], colours: Mapping[str, str]) -> list[Html]:
    """A bar for each class and group."""
    names = dict.fromkeys(name for group in groups for each in group.measured for name in each.iou)
    if not names:
        return [paragraph("No run has figures of its classes yet.", kind="note")]
    named = len(set(colours.values())) < len(colours)  # else a colour says which group it is
    content = [
        paragraph("IoU of each class in percent, – where a class is neither in labels nor predictions.", kind="note")
    ]
    if not named:
        swatches = [(element("span", class_="swatch", style=f"--colour:{colours[g.name]}"), g.name) for g in groups]
        content.append(element("ul", *(element("li", *swatch) for swatch in swatches), class_="legend"))
    items = []
    for name in names:
        means = {group.name: group.average(lambda each, name=name: each.iou.get(name)) for group in groups}  # type: ignore[misc]
        values = {key: (average.mean, f"{average.mean:.1f}") if average else None for key, average in means.items()}
        items.append(element("li", element("span", name, class_="class"), bars(values, colours, named)))
    return [*content, element("ul", *items, class_="classes")]


def settings(groups: Sequence[Group]) -> list[Html]:
    """Only what differs."""
    flat = {group.name: [_flat(run.config) for run in group.runs] for group in groups}
    rows = {
        key: [", ".join(dict.fromkeys(values[key] for values in runs)) for runs in flat.values()]
        for key in next(iter(flat.values()))[0]
    }
    differing = {key: values for key, values in rows.items() if len(set(values)) > 1}
    if not differing:
        return [paragraph("The settings of all runs are the same.", kind="note")]
    columns = [
        Column(name, [values[place] for values in differing.values()], words=True) for place, name in enumerate(flat)
    ]
    return [
        paragraph("Only what differs between the runs; all settings of a run are below, under Runs.", kind="note"),
        table("Settings that differ", Column("setting", list(differing)), *columns),
    ]


def cost(groups: Sequence[Group], baseline: Group) -> list[Html]:
    def differences(figure: Callable[[Cost], float]) -> list[str]:
        (first,) = _costs([baseline], figure)
        pairs = zip(groups, _costs(groups, figure), strict=True)
        return [_signed(None if group is baseline else value - first, 3) for group, value in pairs]

    note = (
        f"Multiply-adds are those of one forward pass of one image; differences are to {baseline.name}. Speed is the "
        "median over training, and training time follows from it: compare them only between runs on one computer."
    )
    columns = [
        Column("parameters, M", [_number(value, 3) for value in _costs(groups, _parameters)]),
        Column("difference", differences(_parameters)),
        Column("multiply-adds, G", [_number(value, 3) for value in _costs(groups, _multiply_adds)]),
        Column("difference", differences(_multiply_adds)),
        Column("of these, to assign pixels, M", [_number(value, 1) for value in _costs(groups, _assignment)]),
        Column("image", ["×".join(map(str, group.config.data.crop)) for group in groups]),
        Column("images/s", [_number(group.images_per_second, 1) for group in groups]),
        Column("training time", [_time(group) for group in groups]),
    ]
    names = Column("run", [group.name for group in groups])
    return [paragraph(note, kind="note"), table("Cost and speed", names, *columns)]


def _costs(groups: Sequence[Group], figure: Callable[[Cost], float]) -> list[float]:
    """NaN where the cost is not known."""
    return [math.nan if (cost := group.runs[0].cost) is None else figure(cost) for group in groups]


def _parameters(cost: Cost) -> float:
    return cost.parameters / 1e6


def _multiply_adds(cost: Cost) -> float:
    return cost.multiply_adds / 1e9


def _assignment(cost: Cost) -> float:
    return cost.assignment / 1e6


def _time(group: Group) -> str:
    run, speed = group.runs[0], group.images_per_second
    return str(timedelta(seconds=round(run.step * run.config.train.batch_size / speed))) if speed else "–"


def run(group: Group, run: Run, baseline: Run) -> list[Html]:
    """A part to open for one run; of several seeds the first is drawn."""
    name = group.name if len(group.runs) == 1 else f"{group.name}, seed {run.config.train.seed}"
    score = "no result" if run.measured is None else f"{run.measured.miou:.2f} mIoU"
    content = [paragraph("Train it again in a new folder:" if run.finished else "Go on with it:"), code(run.command)]
    if run is group.runs[0]:
        other = baseline.folder if run is not baseline and _data(run) == _data(baseline) else None
        content += _drawn(lambda data: run_figures(run.folder, data, other), run.dataset)
    settings = element("details", element("summary", "All settings"), code(run.yaml))
    summary = element("summary", name, small(f"{score}, {run.folder}"))
    return [element("details", summary, *content, settings, class_="run")]


def _data(run: Run) -> tuple[str, str]:
    return run.config.data.root, run.config.data.val


def _counted(average: Average | None, sign: str = "") -> Html:
    return join(shown(average, sign), small(f"n = {average.n}") if average and average.n > 1 else None)


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _signed(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else decimal(value, digits, "+")


def _flat(config: Config) -> dict[str, str]:
    """Setting by dotted name, as YAML writes it."""
    words = {None: "null", True: "true", False: "false"}
    return {
        f"{section}.{key}": words[value] if value is None or isinstance(value, bool) else str(value)
        for section, values in config.to_dict().items()
        for key, value in values.items()
    }
