"""Draw a study's validations and its faults of depth, means over seeds, from its results.json.

    python studies/trained/figures.py studies/trained/rooms

Writes curves.png and faults.png beside the results, of the rows that have most seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from malleable.figures.curves import training
from malleable.figures.stress import stress
from malleable.figures.style import save
from malleable.files import read_json


def main() -> None:
    folder = Path(sys.argv[1])
    rows = read_json(folder / "results.json")["rows"]
    most = max(len(row["runs"]) for row in rows)
    rows = [row for row in rows if len(row["runs"]) == most]
    curves, faults = {}, {}
    for row in rows:
        runs = list(row["runs"].values())
        steps = np.array([int(step) for step in runs[0]["curve"]])
        miou = np.mean([list(run["curve"].values()) for run in runs], axis=0)
        name = row["name"]
        curves[name] = {"miou": (steps, miou)}
        faults[name] = (row["miou"]["mean"], {fault: found["mean"] for fault, found in row["stress"].items()})
    save(training(curves), str(folder / "curves.png"), "png")
    save(stress(faults), str(folder / "faults.png"), "png")


if __name__ == "__main__":
    main()
