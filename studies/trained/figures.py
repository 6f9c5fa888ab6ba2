"""Draw a study's validations and its faults of depth, means over seeds, from its results.json.

    python studies/trained/figures.py studies/trained/rooms

Writes curves.png and faults.png beside the results, of the rows that have at least half of the most seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from malleable.figures.curves import training
from malleable.figures.stress import stress
from malleable.figures.style import Array, save
from malleable.files import read_json


def full_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a study's results that have at least half as many seeds as the one with most."""
    rows = read_json(folder / "results.json")["rows"]
    most = max(len(row["runs"]) for row in rows)
    return [row for row in rows if 2 * len(row["runs"]) >= most]


def read_curves(folder: Path) -> dict[str, tuple[Array, Array]]:
    """Read the validations of these rows: name → (steps, mIoU), both (V,), means over seeds."""
    curves = {}
    for row in full_rows(folder):
        runs = [run["curve"] for run in row["runs"].values()]
        steps = np.array([int(step) for step in runs[0]])
        curves[row["name"]] = (steps, np.mean([list(run.values()) for run in runs], axis=0))
    return curves


def main() -> None:
    folder = Path(sys.argv[1])
    curves = {name: {"miou": curve} for name, curve in read_curves(folder).items()}
    faults = {
        row["name"]: (row["miou"]["mean"], {fault: found["mean"] for fault, found in row["stress"].items()})
        for row in full_rows(folder)
    }
    save(training(curves), str(folder / "curves.png"), "png")
    save(stress(faults), str(folder / "faults.png"), "png")


if __name__ == "__main__":
    main()
