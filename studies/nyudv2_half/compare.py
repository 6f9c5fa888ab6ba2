"""Compare the rows of the NYUDv2 study with each other, seed by seed and class by class.

    python studies/nyudv2_half/compare.py

Reads results.json, which `malleable study studies/nyudv2_half/study.yaml` writes. Rows with a single seed are left out.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from malleable.files import read_json
from malleable.reports.statistics import Average, decimal, shown, shown_p
from malleable.reports.tables import markdown
from malleable.runs.scores import SCORES

RESULTS = Path(__file__).with_name("results.json")
BASELINE, ORDER = "RGB baseline", "malleable K=3"

Row = dict[str, dict[str, float]]
"""Seed → name of a figure or class → percent."""


def read() -> dict[str, Row]:
    """The rows that have several seeds."""
    return {
        row["name"]: {seed: {name: run[name] for name in SCORES} | run["iou"] for seed, run in row["runs"].items()}
        for row in read_json(RESULTS)["rows"]
        if len(row["runs"]) > 1
    }


def gain(row: Row, other: Row, name: str) -> Average:
    """Over the seeds that both have."""
    found = Average.of(row[seed][name] - other[seed][name] for seed in row.keys() & other.keys())
    assert found is not None
    return found


def main() -> None:
    rows = read()
    cells = [["", *(cell for figure in SCORES.values() for cell in (figure, "p"))]]
    for other, row in combinations(rows, 2):
        gains = [gain(rows[row], rows[other], name) for name in SCORES]
        cells.append([f"{row} − {other}", *(cell for each in gains for cell in (shown(each, "+"), shown_p(each)))])
    print(markdown(cells))

    baseline = rows.pop(BASELINE)
    names = [name for name in next(iter(baseline.values())) if name not in SCORES]
    names.sort(key=lambda name: -gain(rows[ORDER], baseline, name).mean)
    cells = [[f"IoU above {BASELINE}", *rows, f"p of {ORDER}"]]
    for name in names:
        gains = [decimal(gain(row, baseline, name).mean, 1, "+") for row in rows.values()]
        cells.append([name, *gains, shown_p(gain(rows[ORDER], baseline, name))])
    print(markdown(cells))


if __name__ == "__main__":
    main()
