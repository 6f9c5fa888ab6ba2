"""Reads what a run's log tells about its course, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from malleable.figures.style import Array
from malleable.runs.log import read_log

CURVES = {"loss": "training loss", "lr": "learning rate", "miou": "validation mIoU (%)"}
"""What is drawn of a run's course → what figures call it."""


@dataclass(frozen=True)
class FieldPath:
    """Tells how a receptive field moved: steps (S,), centers (S, K + 2), temperature (S,), scales (S, K)."""

    steps: Array
    centers: Array
    temperature: Array
    scales: Array


def curves(run: Path) -> dict[str, tuple[Array, Array]]:
    """Give those of ``CURVES`` that were measured in ``run`` → (steps, values), both (S,)."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in read_log(run):
        for name, value in {**row.training, **row.scores}.items():
            points.setdefault(name, []).append((row.step, value))
    arrays = {name: np.array(points[name], float) for name in CURVES if name in points}
    return {name: (array[:, 0], array[:, 1]) for name, array in arrays.items()}


def field_paths(run: Path) -> dict[str, FieldPath]:
    """Give the path of every malleable layer of ``run``, by its name in the backbone."""
    rows = [row for row in read_log(run) if row.receptive_fields]
    paths = {}
    for layer in dict.fromkeys(layer for row in rows for layer in row.receptive_fields):
        learned = [(row.step, row.receptive_fields[layer]) for row in rows if layer in row.receptive_fields]
        paths[layer] = FieldPath(
            np.array([step for step, _ in learned], float),
            *(
                np.array([getattr(field, part) for _, field in learned])
                for part in ("centers", "temperature", "scales")
            ),
        )
    return paths
