"""What a run's log tells about its course, as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from malleable.runs.log import read_log

Array = npt.NDArray[Any]

CURVES = {"loss": "training loss", "lr": "learning rate", "miou": "validation mIoU (%)"}
"""What is drawn of a run's course → what figures call it."""


def curves(run: Path) -> dict[str, tuple[Array, Array]]:
    """Give those of ``CURVES`` that were measured in ``run`` → (steps, values), both (S,)."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in read_log(run):
        for name, value in {**row.training, **row.scores}.items():
            points.setdefault(name, []).append((row.step, value))
    arrays = {name: np.array(points[name], float) for name in CURVES if name in points}
    return {name: (array[:, 0], array[:, 1]) for name, array in arrays.items()}


def field_paths(run: Path) -> dict[str, dict[str, Array]]:
    """Give layer → ``steps`` (S,), ``centers`` (S, K + 2), ``temperature`` (S,) and ``scales`` (S, K) of the run."""
    rows = [row for row in read_log(run) if row.receptive_fields]
    paths = {}
    for layer in dict.fromkeys(layer for row in rows for layer in row.receptive_fields):
        learned = [(row.step, row.receptive_fields[layer]) for row in rows if layer in row.receptive_fields]
        paths[layer] = {
            "steps": np.array([step for step, _ in learned], float),
            "centers": np.array([field.centers for _, field in learned]),
            "temperature": np.array([field.temperature for _, field in learned]),
            "scales": np.array([field.scales for _, field in learned]),
        }
    return paths
