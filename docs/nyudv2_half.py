"""Compare the rows of the NYUDv2 study with each other, seed by seed and class by class.

    python docs/nyudv2_half.py

Reads docs/studies/nyudv2_half/results.json, which `malleable study configs/study/nyudv2_half.yaml` writes. Rows with a
single seed are left out.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from malleable.average import Average, decimal, shown, shown_p
from malleable.data.images import read_json
from malleable.metrics import FIGURES

RESULTS = Path(__file__).parent / "studies/nyudv2_half/results.json"
BASELINE, ORDER = "RGB baseline", "malleable K=3"

Row = dict[str, dict[str, float]]
"""Seed → name of a figure or class → percent."""


def read() -> dict[str, Row]:
    """The rows that have several seeds."""
    return {
        row["name"]: {seed: {name: run[name] for name in FIGURES} | run["iou"] for seed, run in row["runs"].items()}
        for row in read_json(RESULTS)["rows"]
        if len(row["runs"]) > 1
    }


def gain(row: Row, other: Row, name: str) -> Average:
    """Over the seeds that both have."""
    found = Average.of(row[seed][name] - other[seed][name] for seed in row.keys() & other.keys())
    assert found is not None
    return found


def table(heading: list[str], lines: list[list[str]]) -> None:
    print("\n| " + " | ".join(heading) + " |\n|---|" + "---:|" * (len(heading) - 1))
    for line in lines:
        print("| " + " | ".join(line) + " |")


def main() -> None:
    rows = read()
    pairs = []
    for other, row in combinations(rows, 2):
        gains = [gain(rows[row], rows[other], name) for name in FIGURES]
        pairs.append([f"{row} − {other}", *(cell for each in gains for cell in (shown(each, "+"), shown_p(each)))])
    table(["", *(cell for figure in FIGURES.values() for cell in (figure, "p"))], pairs)

    baseline = rows.pop(BASELINE)
    names = [name for name in next(iter(baseline.values())) if name not in FIGURES]
    names.sort(key=lambda name: -gain(rows[ORDER], baseline, name).mean)
    table(
        [f"IoU above {BASELINE}", *rows, f"p of {ORDER}"],
        [
            [
                name,
                *(decimal(gain(row, baseline, name).mean, 1, "+") for row in rows.values()),
                shown_p(gain(rows[ORDER], baseline, name)),
            ]
            for name in names
        ],
    )


if __name__ == "__main__":
    main()
