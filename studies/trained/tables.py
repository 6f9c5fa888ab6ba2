"""Put what the studies recorded into these pages and the project's first one, and draw what depth adds.

    python studies/trained/tables.py

Each table stands below the heading of its section; gains.png is beside this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure

from malleable.figures.style import BLUE, INK, VERMILLION, new_figure, save, styled
from malleable.files import read_json
from malleable.models.cost import measure
from malleable.reports.statistics import Average, decimal
from malleable.reports.tables import markdown
from malleable.runs.config import ModelConfig, build_network, parse_config

HERE = Path(__file__).parent
PAGE, RUNS, FIRST_PAGE = HERE / "README.md", HERE / "nyudv2.md", HERE.parents[1] / "README.md"
RGB = "RGB baseline"

ROWS = {  # as the project's first page calls them
    RGB: "RGB only",
    "depth-aware": "depth-aware convolution",
    "2.5D K=3": "2.5D convolution, 3 kernels",
    "malleable K=1": "**malleable convolution, 1 kernel**",
    "malleable K=3": "**malleable convolution, 3 kernels**",
    "malleable K=3, smoothed depth": "**the same, with smoothed depth**",
    "depth as a fourth channel": "depth in metres as a fourth channel",
    "relative channel": "scale-free depth channel",
    "malleable K=3 + relative channel": "**malleable, 3 kernels + scale-free channel**",
    "second encoder for depth": "a second encoder for depth in metres",
    "second encoder for relative depth": "a second encoder for scale-free depth",
}
FAULTS = {  # as the tables call them
    "depth × 4": "depth × 4",
    "noise of 2 %": "noise of 2 %",
    "noise of a stereo rig": "a stereo rig's noise",
    "50% unknown": "50 % unknown",
    "no depth": "no depth",
    "shifted by 4 pixels": "4 pixels beside",
    "focal length × 1.2": "focal length × 1.2",
}
FIRST_FAULTS = ("depth × 4", "50% unknown", "no depth")  # of rooms, on the first page, beside noise
NYUDV2_FAULTS = ("depth × 4", "noise of 2 %", "50% unknown", "no depth")
NYUDV2 = {"nyudv2": "float32", "nyudv2_mixed": "mixed", "nyudv2_averaged": "averaged"}

Row = dict[str, Any]


def read_rows(study: str) -> dict[str, Row]:
    """Read what a study recorded: name of a row → its means and runs."""
    return {row["name"]: row for row in read_json(HERE / study / "results.json")["rows"]}


@cache
def cost_of(model: ModelConfig, classes: int, crop: tuple[int, int]) -> int:
    """Count the multiply-adds of a network."""
    with torch.device("meta"):
        net = build_network(replace(model, pretrained=False), classes)
    return measure(net, crop).multiply_adds


def costs(runs: Mapping[str, Row], classes: int) -> dict[str, str]:
    """Write the multiply-adds of one run of each row, on a crop, as multiples of the RGB baseline's."""
    configs = {name: parse_config(run["settings"]) for name, run in runs.items()}
    counted = {name: cost_of(config.model, classes, config.data.crop) for name, config in configs.items()}
    return {name: f"{count / counted[RGB]:.2f} ×" if name != RGB else "1 ×" for name, count in counted.items()}


def first_runs(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Take one run of each row of a study."""
    return {name: next(iter(row["runs"].values())) for name, row in rows.items()}


def average_of(recorded: Row) -> Average:
    """Take an average from a record."""
    return Average(recorded["mean"], recorded["spread"], recorded["n"])


def spread(average: Average | None, sign: str = "") -> str:
    """Write "63.0 ± 0.3", "63.0" of a single run, "–" of none."""
    if average is None:
        return "–"
    text = decimal(average.mean, 1, sign)
    return text if average.spread is None else f"{text} ± {average.spread:.1f}"


def world_table(study: str, classes: int) -> str:
    """Tabulate rooms or streets: every row of the first page, and the one with nothing learned."""
    rows = read_rows(study)
    names = [name for name in ROWS if name in rows]
    fixed = "malleable K=3, nothing learned"
    if fixed in rows:
        names.insert(names.index("malleable K=3"), fixed)
    price = costs(first_runs(rows), classes)
    cells = [["", "cost", "seeds", "mIoU", "last quarter", *FAULTS.values(), "another camera"]]
    for name in names:
        row = rows[name]
        found = [row["miou"], *(row["stress"][fault] for fault in FAULTS), row["splits"]["other-camera"]]
        first, *others = (spread(average_of(average)) for average in found)
        last = decimal(row["last_quarter"]["mean"], 1, "+")
        cells.append([name, price[name], str(row["miou"]["n"]), first, last, *others])
    return markdown(cells)


def of_shared_seeds(rows: Mapping[str, Row], names: Sequence[str]) -> dict[str, list[Row]]:
    """Take the runs of the rows of these ``names``, of the seeds that all of them have."""
    seeds = sorted(set.intersection(*(set(rows[name]["runs"]) for name in names)))
    return {name: [rows[name]["runs"][seed] for seed in seeds] for name in names}


def kernels_table() -> str:
    """Tabulate how many kernels, over the seeds that all of them have."""
    every = read_rows("rooms")
    price = costs(first_runs(every), 11)
    cells = [["", "cost", "mIoU", "last quarter", "noise of 2 %", "50 % unknown", "another camera"]]
    for name, runs in of_shared_seeds(every, [f"malleable K={k}" for k in range(1, 6)]).items():
        found = [
            [run["miou"] for run in runs],
            [run["curve"]["4000"] - run["curve"]["3000"] for run in runs],
            [run["stress"]["noise of 2 %"] for run in runs],
            [run["stress"]["50% unknown"] for run in runs],
            [run["splits"]["other-camera"] for run in runs],
        ]
        shown = [decimal(fmean(values), 1, "+" if place == 1 else "") for place, values in enumerate(found)]
        cells.append([name, price[name], *shown])
    return markdown(cells)


def smoothing_table() -> str:
    """Tabulate rooms with depth as it is and smoothed, over the seeds that all of these rows have."""
    names = ["malleable K=3", "malleable K=3, trained with noise", "malleable K=3, smoothed depth"]
    for name in ("2.5D K=3", "malleable K=3 + relative channel"):
        names += [name, f"{name}, smoothed depth"]
    faults = ("noise of 2 %", "noise of a stereo rig", "50% unknown", "shifted by 4 pixels")
    cells = [["", "mIoU", *(FAULTS[fault] for fault in faults), "another camera"]]
    for name, runs in of_shared_seeds(read_rows("rooms"), names).items():
        found = [[run["miou"], *(run["stress"][f] for f in faults), run["splits"]["other-camera"]] for run in runs]
        cells.append([name, *(decimal(fmean(column), 1) for column in zip(*found, strict=True))])
    return markdown(cells)


def nyudv2_runs() -> list[tuple[str, str, str, Row]]:
    """List (name of the row, seed, what is special about it, run) over the studies of NYUDv2, by seed."""
    found = [
        (name, seed, special, run)
        for study, special in NYUDV2.items()
        for name, row in read_rows(study).items()
        for seed, run in row["runs"].items()
    ]
    return sorted(found, key=lambda run: (int(run[1]), list(ROWS).index(run[0])))


def nyudv2_rows() -> dict[str, dict[str, Row]]:
    """Gather the runs of NYUDv2 over its studies: name of a row → seed → run, rows as the first page has them."""
    rows: dict[str, dict[str, Row]] = {}
    for name, seed, _, run in sorted(nyudv2_runs(), key=lambda found: list(ROWS).index(found[0])):
        rows.setdefault(name, {})[seed] = run
    return rows


def nyudv2_means() -> str:
    """Tabulate NYUDv2, a line a row: means over seeds, and the gain on the RGB baseline with its 95 % interval."""
    heads = ["mIoU", "above RGB", "95 % interval", "pixel accuracy", "mean accuracy"]
    cells = [["", "cost", "seeds", *heads, *(FAULTS[fault] for fault in NYUDV2_FAULTS)]]
    rows = nyudv2_rows()
    price = costs({name: next(iter(runs.values())) for name, runs in rows.items()}, 40)
    for name, runs in rows.items():
        gain = Average.of(gains(rows)[name])
        assert gain is not None
        above = [] if name == RGB else [spread(gain, "+"), " to ".join(decimal(end, 1) for end in gain.interval or ())]
        found = [[run[score] for run in runs.values()] for score in ("miou", "pixel_accuracy", "mean_accuracy")]
        faults = [[run["stress"][fault] for run in runs.values()] for fault in NYUDV2_FAULTS]
        miou, *others = (spread(Average.of(values)) for values in (*found, *faults))
        cells.append([name, price[name], str(len(runs)), miou, *(above or ["", ""]), *others])
    return markdown(cells)


def nyudv2_table() -> str:
    """Tabulate NYUDv2, a line a run."""
    heads = ["mIoU", "pixel accuracy", "mean accuracy", "last quarter"]
    cells = [["", "seed", *heads, *(FAULTS[fault] for fault in NYUDV2_FAULTS)]]
    for name, seed, special, run in nyudv2_runs():
        scores = [run[score] for score in ("miou", "pixel_accuracy", "mean_accuracy")]
        last = run["curve"]["5000"] - run["curve"]["3750"]
        left = [run["stress"][fault] for fault in NYUDV2_FAULTS]
        numbers = [*(decimal(v, 1) for v in scores), decimal(last, 1, "+"), *(decimal(v, 1) for v in left)]
        cells.append([name, f"{seed}, {special}", *numbers])
    return markdown(cells)


def first_table() -> str:
    """Tabulate for the project's first page what was reached with depth as it was in training."""
    rooms, streets, nyudv2 = read_rows("rooms"), read_rows("streets"), nyudv2_rows()
    price = costs(first_runs(rooms), 11)
    columns = {
        "NYUDv2": [Average.of(run["miou"] for run in nyudv2.get(name, {}).values()) for name in ROWS],
        "rooms": [average_of(rooms[name]["miou"]) for name in ROWS],
        "streets": [average_of(streets[name]["miou"]) for name in ROWS],
    }
    return with_columns(["", "cost"], [[title, price[name]] for name, title in ROWS.items()], columns)


def first_faults() -> str:
    """Tabulate for the project's first page what is left when depth goes wrong, means over seeds."""
    worlds, nyudv2 = {world: read_rows(world) for world in ("rooms", "streets")}, nyudv2_rows()
    noise = "noise of 2 %"
    columns = {f"{noise}, NYUDv2": [[run["stress"][noise] for run in nyudv2.get(name, {}).values()] for name in ROWS]}
    for world, fault in (("rooms", noise), ("streets", noise), *(("rooms", fault) for fault in FIRST_FAULTS)):
        found = [worlds[world][name]["stress"][fault]["mean"] for name in ROWS]
        columns[f"{FAULTS[fault]}, {world}"] = [[mean] for mean in found]
    for world, rows in worlds.items():
        columns[f"another camera, {world}"] = [[rows[name]["splits"]["other-camera"]["mean"]] for name in ROWS]
    means = {head: [Average.of([fmean(v)]) if v else None for v in column] for head, column in columns.items()}
    return with_columns([""], [[title] for title in ROWS.values()], means)


def with_columns(heads: list[str], lines: list[list[str]], columns: dict[str, list[Average | None]]) -> str:
    """Add ``columns`` to a table's lines; the highest score of a column that has every row is bold."""
    for averages in columns.values():
        means = [round(average.mean, 1) for average in averages if average]
        for line, average in zip(lines, averages, strict=True):
            best = average and len(means) == len(lines) and round(average.mean, 1) == max(means)
            line.append(f"**{spread(average)}**" if best else spread(average))
    return markdown([[*heads, *columns], *lines])


def gains(rows: dict[str, dict[str, Row]]) -> dict[str, list[float]]:
    """Subtract the RGB baseline of the same seed: name of a row → its gains in mIoU."""
    baseline = rows[RGB]
    return {
        name: [run["miou"] - baseline[seed]["miou"] for seed, run in runs.items() if seed in baseline]
        for name, runs in rows.items()
    }


@styled
def draw(panels: dict[str, dict[str, list[float]]]) -> Figure:
    """Draw what every row adds to the RGB baseline: a dot a seed, and the mean with its 95 % interval from three on."""
    names = [name for name in ROWS if name != RGB]
    titles = [ROWS[name].strip("*") for name in names]
    figure, axes = new_figure(11.5, 3.7, 1, len(panels), sharey=True)
    for panel, (title, found) in zip(axes[0], panels.items(), strict=True):
        for place, name in enumerate(names):
            values = found.get(name, [])
            average = Average.of(values)
            if average is None:
                continue
            colour = VERMILLION if name.startswith("malleable") else BLUE
            panel.plot(values, [place] * len(values), "o", markersize=4, color=colour, markerfacecolor="white")
            if average.n > 2 and average.interval:
                panel.plot(average.interval, [place, place], color=colour, linewidth=2)
                panel.plot([average.mean], [place], "|", markersize=13, markeredgewidth=2, color=INK)
        panel.set(title=title, xlabel="mIoU above the RGB baseline")
        panel.set_xlim(0, 1.08 * panel.get_xlim()[1])
    axes[0, 0].set_yticks(range(len(names)), titles)
    axes[0, 0].invert_yaxis()
    return figure


def tables() -> Iterator[tuple[Path, str, str]]:
    """Give every table, after the page and the heading below which it stands."""
    yield FIRST_PAGE, "## Does it help?", first_table()
    yield FIRST_PAGE, "### When depth goes wrong", first_faults()
    yield PAGE, "## Rooms", world_table("rooms", 11)
    yield PAGE, "## Streets", world_table("streets", 10)
    yield PAGE, "## How many kernels", kernels_table()
    yield PAGE, "## Smoothing depth", smoothing_table()
    yield PAGE, "## NYUDv2", nyudv2_means()
    yield RUNS, "## Every run", nyudv2_table()


def with_table(text: str, heading: str, table: str) -> str:
    """Replace the first table below ``heading``."""
    before, found, after = text.partition(f"\n{heading}")
    assert found, f"no heading {heading!r}"
    return before + found + re.sub(r"(^\|.*\n)+", lambda _: table, after, count=1, flags=re.MULTILINE)


def main() -> None:
    for page, heading, table in tables():
        page.write_text(with_table(page.read_text(encoding="utf-8"), heading, table), encoding="utf-8")
    panels = {study: {name: row["runs"] for name, row in read_rows(study).items()} for study in ("rooms", "streets")}
    panels["NYUDv2 at half size"] = nyudv2_rows()
    save(draw({title: gains(rows) for title, rows in panels.items()}), str(HERE / "gains.png"), "png")


if __name__ == "__main__":
    main()
