"""Runs of a study that `malleable study` left in a folder, measured once more for a question of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import nn

from malleable.files import read_json, write_whole
from malleable.inference.load import load_trained
from malleable.reports.plan import Plan, PlannedRun

T = TypeVar("T")
Found = dict[str, dict[str, T]]
"""Row → seed → what was measured."""


def measure_again(plan: Plan, runs: Path, name: str, measure: Callable[[PlannedRun, nn.Module], T]) -> Found[T]:
    """Measure all finished runs of ``plan`` that the file ``name`` beside its results does not have yet.

    Args:
        runs: the folder of the study's runs; those that are not there are left out.
        measure: is given a run and its network; what it returns is kept as JSON.
    """
    kept = record(plan) / name
    found: Found[T] = read_json(kept) if kept.exists() else {}
    results = read_json(record(plan) / "results.json")
    finished = {(row["name"], seed) for row in results["rows"] for seed in row["runs"]}
    for run in plan.runs:
        seed = str(run.seed)
        if (run.row, seed) not in finished or seed in found.get(run.row, {}) or not (runs / run.folder).is_dir():
            continue
        found.setdefault(run.row, {})[seed] = measure(run, load_trained(str(runs / run.folder)).net)
        write_whole(kept, (json.dumps(found, indent=1) + "\n").encode())
        print(f"{run}: measured", flush=True)
    return found


def record(plan: Plan) -> Path:
    """Tell where the study's results are."""
    return Path(plan.record or plan.out)
