"""Writes tables on the terminal and in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from textwrap import fill

from malleable.progress import plain_console
from malleable.reports.comparison import Compared, Comparison
from malleable.reports.statistics import Average, shown, shown_p
from malleable.runs.scores import SCORES


def print_cells(cells: Sequence[Sequence[str]], title: str, caption: str | None = None) -> None:
    """Print a table of a heading and lines on standard output; an empty line sets those after it apart."""
    from rich import box
    from rich.table import Table

    heading, *lines = cells
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, cell in enumerate(heading):  # numbers stay on one line, names may be long
        table.add_column(
            fill(cell, 12), justify="right" if place else "left", no_wrap=place > 0, vertical="bottom", overflow="fold"
        )
    for line in lines:
        table.add_row(*line)
    width = None if sys.stdout.isatty() else 120
    plain_console(width=width).print(table)


def print_table(comparison: Comparison) -> None:
    """Print the scores."""
    cells = score_cells(comparison)
    seeds = "; mean ± standard deviation over seeds" if any(len(row.counted) > 1 for row in comparison.rows) else ""
    test = "; p of the gain by a two-sided t-test" if "p" in cells[0] else ""
    late = "; last quarter: mIoU that the last quarter of the updates added" if "last quarter" in cells[0] else ""
    print_cells(cells, comparison.title, f"percent{seeds}{test}{late}")


def to_markdown(comparison: Comparison) -> str:
    """Write the scores, beside the paper's if it has any, what faults leave, other splits, and receptive fields."""
    scores, learned = score_cells(comparison), field_cells(comparison)
    papers = [row.paper for row in _measured(comparison)]
    if any(papers):
        column = ["" if paper is None else f"{paper.miou:.2f} ({paper.label})" for paper in papers]
        scores = [[*line, cell] for line, cell in zip(scores, ["paper's mIoU", *column], strict=True)]
    others = (stress_cells(comparison), split_cells(comparison), learned)
    tables = [scores, *(cells for cells in others if len(cells) > 1)]
    return "\n".join([f"{comparison.title}\n", *map(markdown, tables)])


def score_cells(comparison: Comparison) -> list[list[str]]:
    """Give a heading, then a line for each row with a result; p and the last quarter only if a row has one."""
    first = comparison.baseline
    lines = [["", "seeds", *SCORES.values(), f"mIoU above {first.name}", "p", "last quarter"]]
    for row in _measured(comparison):
        number = f" (n = {row.gain.n})" if row.gain and row.gain.n < len(row.counted) else ""
        gain = ["", ""] if row is first else [shown(row.gain, "+") + number, shown_p(row.gain)]
        late = shown(row.last_quarter, "+") if row.last_quarter else ""
        lines.append([row.name, str(len(row.counted)), *map(shown, row.scores.values()), *gain, late])
    kept = [place for place, name in enumerate(lines[0]) if place < 6 or any(line[place] for line in lines[1:])]
    return [[line[place] for place in kept] for line in lines]


def stress_cells(comparison: Comparison) -> list[list[str]]:
    """Give a heading of the rows that were tested with faults of depth, then a line for each fault."""
    found = {row.name: row.beyond("stress") for row in _measured(comparison) if row.stress}
    return _by_name("mIoU, by the fault of depth", found)


def split_cells(comparison: Comparison) -> list[list[str]]:
    """Give a heading of the rows that were measured on other splits, then a line for each split, its own first."""
    found = {row.name: row.beyond("splits") for row in _measured(comparison) if row.splits}
    return _by_name("mIoU, by split", found)


def _by_name(title: str, found: Mapping[str, Mapping[str, Average | None]]) -> list[list[str]]:
    """Give a heading of rows, then a line for each name that any of them has."""
    names = dict.fromkeys(name for values in found.values() for name in values)
    return [[title, *found], *([name, *(shown(values.get(name)) for values in found.values())] for name in names)]


def field_cells(comparison: Comparison) -> list[list[str]]:
    """Give a heading, then where the receptive fields of malleable rows ended: a line for each row and layer."""
    lines = [["", "layer", "centers", "temperature", "scales"]]
    for row in comparison.rows:
        seeds = [run.receptive_fields for run, _ in row.counted]
        for layer in dict.fromkeys(layer for fields in seeds for layer in fields):
            learned = [fields[layer] for fields in seeds if layer in fields]
            centers = _means([field.centers for field in learned])
            temperature = shown(Average.of(field.temperature for field in learned))
            lines.append([row.name, layer, centers, temperature, _means([field.scales for field in learned])])
    return lines


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """Write a table of a heading and lines; all columns but the first are aligned to the right."""
    heading, *lines = (f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in cells)
    rule = "|---|" + "---:|" * (len(cells[0]) - 1)
    return "\n".join([heading, rule, *lines]) + "\n"


def _measured(comparison: Comparison) -> list[Compared]:
    return [row for row in comparison.rows if row.counted]


def _means(values: Sequence[Sequence[float]]) -> str:
    return ", ".join(shown(Average.of(column)) for column in zip(*values, strict=True))
