"""``malleable report``: runs beside each other, and beside the paper, in one HTML file that opens from disk."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from malleable.data.sample import SampleDataset
from malleable.figures.curves import save
from malleable.figures.run import comparison_figures, run_figures
from malleable.figures.style import INK, LINES
from malleable.files import write_whole
from malleable.progress import with_progress
from malleable.reports.comparison import Compared, Comparison
from malleable.reports.outcome import Run, read_run
from malleable.reports.paper import paper_row
from malleable.reports.statistics import Average, decimal, shown, shown_p
from malleable.runs.folder import SETTINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNATURE = "Written by malleable"
"""What tells a report of ours from another page."""

_COLOURS = tuple("var(--ink)" if colour == INK else colour for colour in LINES)  # as the curves have them
_LARGE = 150_000  # bytes; a browser takes long over such a drawing

_ABOUT = {
    "training": ("Training", "Loss and validation scores by step."),
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
    "receptive_field_path": ("Path of the receptive fields", "Centers and temperature of every layer by step."),
}
"""Name of a figure → its title, and what it shows."""


class Column(NamedTuple):
    """A column of numbers, or of ``words``. A cell is text, or text with lines to show small below it."""

    head: str
    cells: Sequence[str | tuple[str, ...]]
    words: bool = False


class Bar(NamedTuple):
    """A bar that is ``length`` percent long, with ``text`` at its end."""

    name: str
    length: float
    text: str
    colour: str


class Picture(NamedTuple):
    """A figure that the page carries in itself, as a data URL."""

    title: str
    about: str
    source: str
    width: int
    height: int


def write_report(groups: Mapping[str, Sequence[Path]], out: Path, title: str, intro: str = "") -> None:
    """Write the report of ``groups``: shown name → its runs' folders, several of them if they are seeds of one method.

    Scores are those of the last validation of training, however a run was evaluated afterwards. The first group
    without depth, or the first of all, is what the others are compared with. ``out`` is replaced if it exists.
    """
    write_page({name: [read_run(run, evaluated=False) for run in runs] for name, runs in groups.items()},
               out, title, intro)  # fmt: skip


def write_page(groups: Mapping[str, Sequence[Run]], out: Path, title: str, intro: str = "") -> None:
    """Write the report of runs that are read already."""
    if not groups or not all(groups.values()):
        raise ValueError("groups must hold at least one run each")
    comparison = Comparison(title, groups)
    rows, baseline = comparison.rows, comparison.baseline
    colours = {row.name: _COLOURS[number % len(_COLOURS)] for number, row in enumerate(rows)}
    parts: list[Callable[[], Any]] = [
        partial(_results, comparison, colours),
        partial(_together, rows),
        partial(_classes, rows, colours),
        partial(_settings, rows),
        partial(_cost, comparison),
        *(partial(_run, row, run, baseline.runs[0]) for row in rows for run in row.runs),
    ]
    results, figures, classes, settings, cost, *runs = [part() for part in with_progress(parts, len(parts), out.name)]
    today = date.today()
    environment = Environment(
        loader=PackageLoader("malleable.reports", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    page = environment.get_template("report.html").render(
        title=title,
        intro=intro,
        headline=_headline(comparison),
        settings_measured=list(dict.fromkeys(row.setting for row in rows if row.setting is not None)),
        note=_note(comparison),
        baseline=baseline.name,
        several_seeds=any(len(row.runs) > 1 for row in rows),
        results=results,
        figures=figures,
        classes=classes,
        settings=settings,
        cost=cost,
        runs=runs,
        signature=f"{SIGNATURE} {version('malleable')} on {today.day} {today:%B %Y}",
    )
    write_whole(out, f"{page}\n".encode())


def _headline(comparison: Comparison) -> dict[str, str] | None:
    """Speak of the first malleable row, else of the last: which one is not chosen by its result."""
    measured = [row for row in comparison.rows if row.miou is not None]
    row = next((row for row in measured if row.config.model.conv == "malleable"), measured[-1] if measured else None)
    if row is None or row.miou is None:
        return None
    difference, test = "", ""
    gain = None if row is comparison.baseline else row.gain
    if gain is not None:
        size = f"{abs(gain.mean):.1f}"
        difference = "level with" if size == "0.0" else f"{size} {'above' if gain.mean > 0 else 'below'}"
        interval, p = _interval(gain), shown_p(gain)
        test = f"95 % interval {interval}, p {p if p.startswith('<') else f'= {p}'}, {gain.n} seeds" if interval else ""
    return {"name": row.name, "miou": f"{row.miou.mean:.1f}", "difference": difference,
            "baseline": comparison.baseline.name, "test": test}  # fmt: skip


def _note(comparison: Comparison) -> str:
    """Say what is not finished, and what has scores that may not be compared with the baseline's."""
    sentences = []
    unfinished = [row.name for row in comparison.rows if not all(run.finished for run in row.runs)]
    if unfinished:
        sentences.append(f"Not finished yet: {', '.join(unfinished)}.")
    apart = [f"{row.name} ({row.miou.mean:.1f} mIoU)" for row in comparison.rows if row.miou and row.gain is None]
    if apart:
        sentences.append(
            f"Not compared with {comparison.baseline.name}: {', '.join(apart)}. Compared are only scores that were "
            "measured alike, at the end of training or after the same step, of common seeds if there are several."
        )
    return " ".join(sentences)


def _results(comparison: Comparison, colours: Mapping[str, str]) -> dict[str, Any]:
    """mIoU as bars, then everything as a table, beside the paper where it has the method."""
    rows, baseline = comparison.rows, comparison.baseline
    gains = [None if row is baseline else row.gain for row in rows]
    papers = [paper_row(row.config, bool(row.counted) and len(row.counted[0][1].protocol.scales) > 1) for row in rows]
    parameters, multiply_adds, _ = _costs(rows)
    paired = all(row.seeds & baseline.seeds for row, gain in zip(rows, gains, strict=True) if gain)
    notes = [f"In percent. Differences are to {baseline.name}{', seed by seed' if paired else ''}."]
    if any(row.miou.spread is not None for row in rows if row.miou):
        notes.append("± is the sample standard deviation over n runs.")
    columns = [
        Column("run", [(row.name, *_remarks(row)) for row in rows]),
        Column("mIoU", [_counted(row.miou) for row in rows]),
        Column("difference", [_counted(gain, "+") for gain in gains]),
        Column("p", [shown_p(gain) or "–" for gain in gains]),
        Column("pixel accuracy", [shown(row.scores["pixel_accuracy"]) for row in rows]),
        Column("mean accuracy", [shown(row.scores["mean_accuracy"]) for row in rows]),
        Column("95 % interval of the difference", [_interval(gain) or "–" for gain in gains]),
        Column(
            "mIoU in the paper",
            ["–" if paper is None else (f"{paper.miou:.2f}", f"pixel accuracy {paper.pixel_accuracy:.2f}", paper.label)
             for paper in papers],
            words=True,
        ),
        Column("measured on", [(row.setting or "–", _source(row)) for row in rows], words=True),
        Column("trained", [(row.config.model.backbone, row.runs[0].budget) for row in rows], words=True),
        Column("parameters, M", [_number(value) for value in parameters]),
        Column("multiply-adds, G", [_number(value) for value in multiply_adds]),
        Column("images/s", [_number(row.images_per_second, 1) for row in rows]),
    ]  # fmt: skip
    absent = set()
    if any(shown_p(gain) for gain in gains):
        notes.append(
            "p is how often a difference at least this large would arise if there were none (two-sided paired t-test, "
            "not corrected for the number of rows)."
        )
    else:
        absent |= {"p", "95 % interval of the difference"}
    if any(papers):
        notes.append("The paper's scores are for orientation: what they were reached with stands beside them.")
    else:
        absent.add("mIoU in the paper")
    return {
        "bars": [_bar(row.name, row.miou, shown(row.miou), colours) for row in rows],
        "notes": notes,
        "columns": [column for column in columns if column.head not in absent],
    }


def _remarks(row: Compared) -> list[str]:
    """Say what to know about a row besides its scores."""
    remarks = []
    steps = row.config.train.steps
    unfinished = [run for run in row.runs if not run.finished]
    if unfinished and len(row.runs) == 1:
        remarks.append(f"unfinished, step {unfinished[0].step} of {steps}")
    elif unfinished:
        seeds = ", ".join(f"seed {run.config.train.seed} at step {run.step}" for run in unfinished)
        remarks.append(f"unfinished: {seeds} of {steps}")
    left_out = len(row.runs) - len(row.counted)
    if row.counted and left_out:
        remarks.append(f"{left_out} of {len(row.runs)} runs left out: no result, or measured otherwise")
    return remarks


def _source(row: Compared) -> str:
    if not row.counted:
        return "no results.json and no validation"
    sources, step = dict.fromkeys(scores.source for _, scores in row.counted), row.counted[0][1].step
    return " and ".join(sources) + (f", step {step}" if step is not None else "")


def _together(rows: Sequence[Compared]) -> dict[str, Any]:
    """Draw the first run of each row beside the others."""
    first = {row.name: row.runs[0] for row in rows}
    datasets = {_data(run): run.dataset for run in first.values()}
    alike = len(datasets) == 1

    def draw(dataset: SampleDataset | None) -> dict[str, Figure]:
        figures = comparison_figures({name: run.folder for name, run in first.items()}, dataset)
        return {name: figure for name, figure in figures.items() if alike or name != "qualitative"}

    return _drawn(draw, next(iter(datasets.values())) if alike else "the runs were trained on different data")


def _drawn(
    draw: Callable[[SampleDataset | None], Mapping[str, Figure]], dataset: SampleDataset | str
) -> dict[str, Any]:
    """Draw figures, and say what could not be drawn."""
    missing = [f"Figures that need the data are left out: {dataset}"] if isinstance(dataset, str) else []
    try:
        figures = draw(None if isinstance(dataset, str) else dataset)
    except (ValueError, OSError, RuntimeError) as error:
        figures, missing = {}, [f"The figures could not be drawn: {error}"]
    pictures = [picture(figure, *_ABOUT.get(name, (name, ""))) for name, figure in figures.items()]
    if not pictures and not missing:
        missing = ["There is nothing to draw: neither metrics.jsonl nor a checkpoint was found"]
    return {"pictures": pictures, "missing": missing}


def picture(figure: Figure, title: str, about: str) -> Picture:
    """Save a drawing as SVG, or as PNG of 256 colours, a third of the bytes, if it has images in it or is large."""

    def saved(kind: str) -> io.BytesIO:
        file = io.BytesIO()
        save(figure, file, kind)
        return file

    with_images = any(axes.images for axes in figure.axes)
    media, content = "image/svg+xml", b"" if with_images else saved("svg").getvalue()
    if with_images or len(content) > _LARGE:
        file = io.BytesIO()
        Image.open(saved("png")).convert("RGB").quantize(256).save(file, "PNG", optimize=True)
        media, content = "image/png", file.getvalue()
    width, height = (round(100 * inches) for inches in figure.get_size_inches())
    return Picture(title, about, f"data:{media};base64,{base64.b64encode(content).decode()}", width, height)


def _classes(rows: Sequence[Compared], colours: Mapping[str, str]) -> dict[str, Any]:
    """Give a bar for each class and row."""
    lines = {}
    for name in dict.fromkeys(name for row in rows for name in row.iou):
        means = {row.name: row.iou.get(name) for row in rows}
        lines[name] = [_bar(key, mean, f"{mean.mean:.1f}" if mean else "–", colours) for key, mean in means.items()]
    named = len(set(colours.values())) < len(colours)  # else a colour says which row it is
    return {"lines": lines, "colours": colours, "named": named}


def _settings(rows: Sequence[Compared]) -> list[Column]:
    """Give only what differs, by dotted name as YAML writes it."""
    words = {None: "null", True: "true", False: "false"}
    shown: dict[str, list[str]] = {}
    for row in rows:
        configs = [run.config.to_dict() for run in row.runs]
        for section, settings in configs[0].items():
            for key in settings:
                values = [config[section][key] for config in configs]
                texts = (words[v] if v is None or isinstance(v, bool) else str(v) for v in values)
                shown.setdefault(f"{section}.{key}", []).append(", ".join(dict.fromkeys(texts)))
    differing = {name: texts for name, texts in shown.items() if len(set(texts)) > 1}
    columns = [
        Column(row.name, [texts[place] for texts in differing.values()], words=True) for place, row in enumerate(rows)
    ]
    return [Column("setting", list(differing)), *columns] if differing else []


def _cost(comparison: Comparison) -> list[Column]:
    rows = comparison.rows
    place = rows.index(comparison.baseline)
    parameters, multiply_adds, assignment = _costs(rows)

    def differences(values: Sequence[float]) -> list[str]:
        return ["–" if row is comparison.baseline else _number(value - values[place], 3, "+")
                for row, value in zip(rows, values, strict=True)]  # fmt: skip

    def time(row: Compared) -> str:
        run, speed = row.runs[0], row.images_per_second
        return str(timedelta(seconds=round(run.step * run.config.train.batch_size / speed))) if speed else "–"

    return [
        Column("run", [row.name for row in rows]),
        Column("parameters, M", [_number(value, 3) for value in parameters]),
        Column("difference", differences(parameters)),
        Column("multiply-adds, G", [_number(value, 3) for value in multiply_adds]),
        Column("difference", differences(multiply_adds)),
        Column("of these, to assign pixels, M", [_number(value, 1) for value in assignment]),
        Column("image", ["×".join(map(str, row.config.data.crop)) for row in rows]),
        Column("images/s", [_number(row.images_per_second, 1) for row in rows]),
        Column("training time", [time(row) for row in rows]),
    ]


def _costs(rows: Sequence[Compared]) -> tuple[list[float], list[float], list[float]]:
    """Give millions of parameters, billions of multiply-adds and millions to assign pixels; NaN where not known."""
    costs = [row.runs[0].cost for row in rows]
    return (
        [cost.parameters / 1e6 if cost else math.nan for cost in costs],
        [cost.multiply_adds / 1e9 if cost else math.nan for cost in costs],
        [cost.assignment / 1e6 if cost else math.nan for cost in costs],
    )


def _run(row: Compared, run: Run, baseline: Run) -> dict[str, Any]:
    """Tell all about one run; of several seeds the first is drawn."""
    drawn: dict[str, Any] = {"pictures": [], "missing": []}
    if run is row.runs[0]:
        other = baseline.folder if run is not baseline and _data(run) == _data(baseline) else None
        drawn = _drawn(lambda data: run_figures(run.folder, data, other), run.dataset)
    score = "no result" if run.scores is None else f"{run.scores.miou:.2f} mIoU"
    return {
        "name": row.name if len(row.runs) == 1 else f"{row.name}, seed {run.config.train.seed}",
        "about": f"{score}, {run.folder}",
        "finished": run.finished,
        "command": run.command,
        "drawn": drawn,
        "yaml": (run.folder / SETTINGS).read_text(encoding="utf-8"),
    }


def _data(run: Run) -> tuple[str, str]:
    return run.config.data.root, run.config.data.val


def _bar(name: str, mean: Average | None, text: str, colours: Mapping[str, str]) -> Bar:
    return Bar(name, mean.mean if mean else 0.0, text, colours[name])


def _counted(average: Average | None, sign: str = "") -> tuple[str, ...]:
    return (shown(average, sign), *([f"n = {average.n}"] if average and average.n > 1 else []))


def _interval(gain: Average | None) -> str:
    """Write the 95 % interval; nothing where there is none."""
    interval = gain and gain.interval
    return f"{decimal(interval[0], 2, '+')} to {decimal(interval[1], 2, '+')}" if interval else ""


def _number(value: float | None, digits: int = 2, sign: str = "") -> str:
    return "–" if value is None or math.isnan(value) else decimal(value, digits, sign)
