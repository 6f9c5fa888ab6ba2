"""Puts runs beside each other, and beside the paper, in one HTML file that opens from disk."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from malleable import __version__
from malleable.data.sample import SampleDataset
from malleable.figures.run import comparison_figures, run_figures
from malleable.figures.stress import stress
from malleable.figures.style import INK, LINES, save
from malleable.files import write_whole
from malleable.progress import with_progress
from malleable.reports.comparison import Compared, Comparison
from malleable.reports.outcome import Run, read_run
from malleable.reports.statistics import Average, decimal, number, shown, shown_p
from malleable.reports.tables import split_cells, stress_cells
from malleable.runs.folder import SETTINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNATURE = "Written by malleable"
"""This tells a report of ours from another page."""

_COLOURS = tuple("var(--ink)" if colour == INK else colour for colour in LINES)  # as the curves have them
_LARGE = 150_000  # bytes; a browser takes long over such a drawing


class Picture(NamedTuple):
    """Holds a figure that the page carries in itself, as a data URL."""

    name: str
    source: str
    width: int
    height: int


def write_report(
    groups: Mapping[str, Sequence[str | Path]], out: str | Path, title: str, intro: str = "", trust: bool = False
) -> None:
    """Write the report of ``groups``: shown name → its runs' folders, several of them if they are seeds of one method.

    Scores are those of the last validation of training, however a run was evaluated afterwards. The first group
    without depth, or the first of all, is what the others are compared with. ``out`` is replaced if it exists. With
    ``trust`` factories of one's own that checkpoints name are imported.
    """
    read = {name: [read_run(Path(run), evaluated=False, trust=trust) for run in runs] for name, runs in groups.items()}
    write_page(read, Path(out), title, intro)


def write_page(groups: Mapping[str, Sequence[Run]], out: Path, title: str, intro: str = "") -> None:
    """Write the report of runs that are read already."""
    if not groups or not all(groups.values()):
        raise ValueError("groups must hold at least one run each")
    comparison = Comparison(title, groups)
    rows, baseline = comparison.rows, comparison.baseline
    parts: list[Callable[[], Any]] = [
        lambda: {row.name: row.runs[0].cost for row in rows},
        partial(_together, rows),
        *(partial(_run, row, run, baseline.runs[0]) for row in rows for run in row.runs),
    ]
    costs, figures, *runs = [part() for part in with_progress(parts, len(parts), out.name)]
    measured = [row for row in rows if row.miou is not None]
    malleable = [row for row in measured if row.config.model.conv == "malleable"]
    gains = [row for row in rows if row is not baseline and row.gain]
    today = date.today()
    environment = Environment(
        loader=PackageLoader("malleable.reports", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(shown=shown, p=shown_p, interval=_interval, number=number)
    page = environment.get_template("report.html").render(
        title=title,
        intro=intro,
        rows=rows,
        baseline=baseline,
        subject=next(iter(malleable or measured[-1:]), None),  # not chosen by its result
        colours={row.name: _COLOURS[number % len(_COLOURS)] for number, row in enumerate(rows)},
        unfinished=[row for row in rows if not all(run.finished for run in row.runs)],
        apart=[row for row in measured if row.gain is None],
        paired=all(row.seeds & baseline.seeds for row in gains),
        several_counted=any(len(row.counted) > 1 for row in rows),
        tested=any(shown_p(row.gain) for row in gains),
        with_paper=any(row.paper for row in rows),
        figures=figures,
        beyond=[section for section in _beyond(comparison) if len(section[-1]) > 1],
        classes=list(dict.fromkeys(name for row in rows for name in row.iou)),
        settings=_settings(rows),
        costs=costs,
        runs=runs,
        signature=f"{SIGNATURE} {__version__} on {today.day} {today:%B %Y}",
    )
    write_whole(out, f"{page}\n".encode())


def _beyond(comparison: Comparison) -> list[tuple[str, str, list[list[str]]]]:
    """Give title, note and table of what was measured with other depth and on other images."""
    return [
        ("Faults of depth", "mIoU in percent when depth is not what it was in training.", stress_cells(comparison)),
        ("Other splits", "mIoU in percent on other images than those of the validation.", split_cells(comparison)),
    ]


def _together(rows: Sequence[Compared]) -> dict[str, Any]:
    """Draw the first run of each row beside the others."""
    alike = len({_data(row.runs[0]) for row in rows}) == 1

    def draw(dataset: SampleDataset | None) -> dict[str, Figure]:
        figures = comparison_figures({row.name: row.runs[0].folder for row in rows}, dataset, rows[0].runs[0].trust)
        tested = {}
        for row in rows:
            if row.stress:
                none, *faults = ((fault, found.mean) for fault, found in row.beyond("stress").items() if found)
                tested[row.name] = (none[1], dict(faults))
        drawn = {"stress": stress(tested)} if tested else {}
        return {name: figure for name, figure in {**figures, **drawn}.items() if alike or name != "qualitative"}

    return _drawn(draw, rows[0].runs[0].dataset if alike else "the runs were trained on different data")


def _drawn(
    draw: Callable[[SampleDataset | None], Mapping[str, Figure]], dataset: SampleDataset | str
) -> dict[str, Any]:
    """Draw figures, and say what could not be drawn."""
    missing = [f"Figures that need the data are left out: {dataset}"] if isinstance(dataset, str) else []
    try:
        figures = draw(None if isinstance(dataset, str) else dataset)
        pictures = [picture(name, figure) for name, figure in figures.items()]
    except (ValueError, OSError, RuntimeError) as error:
        pictures, missing = [], [f"The figures could not be drawn: {error}"]
    if not pictures and not missing:
        missing = ["There is nothing to draw: neither metrics.jsonl nor a checkpoint was found"]
    return {"pictures": pictures, "missing": missing}


def picture(name: str, figure: Figure) -> Picture:
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
    return Picture(name, f"data:{media};base64,{base64.b64encode(content).decode()}", width, height)


def _settings(rows: Sequence[Compared]) -> dict[str, list[str]]:
    """Give only what differs, by dotted name: the values of each row as YAML writes them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        configs = [run.config.to_dict() for run in row.runs]
        for section, settings in configs[0].items():
            for key in settings:
                values = [config[section][key] for config in configs]
                texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
                found.setdefault(f"{section}.{key}", []).append(", ".join(dict.fromkeys(texts)))
    return {name: texts for name, texts in found.items() if len(set(texts)) > 1}


def _run(row: Compared, run: Run, baseline: Run) -> dict[str, Any]:
    """Draw one run, of several seeds the first, and read its settings."""
    drawn: dict[str, Any] = {"pictures": [], "missing": []}
    if run is row.runs[0]:
        other = baseline.folder if run is not baseline and _data(run) == _data(baseline) else None
        drawn = _drawn(lambda data: run_figures(run.folder, data, other, run.trust), run.dataset)
    return {"row": row, "run": run, "drawn": drawn, "yaml": (run.folder / SETTINGS).read_text(encoding="utf-8")}


def _data(run: Run) -> tuple[str, str]:
    return run.config.data.root, run.config.data.val


def _interval(gain: Average | None) -> str:
    """Write the 95 % interval; nothing where there is none."""
    interval = gain and gain.interval
    return f"{decimal(interval[0], 2, '+')} to {decimal(interval[1], 2, '+')}" if interval else ""
