"""What metrics.jsonl tells about the course of a run, as arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from malleable.runs.log import METRICS, SCORE, read_metrics

Array = npt.NDArray[Any]

_CENTER = re.compile(r"receptive_field/(.+)/center_(\d+)")


def curves(run: Path) -> dict[str, tuple[Array, Array]]:
    """Of ``loss``, ``lr`` and ``val/miou`` those that were measured in ``run`` → (steps, values), both (S,)."""
    rows = read_metrics(run / METRICS)
    found = {}
    for name in ("loss", "lr", SCORE):
        points = np.array([(row["step"], row[name]) for row in rows if name in row], float)
        if len(points):
            found[name] = (points[:, 0], points[:, 1])
    return found


def field_paths(run: Path) -> dict[str, dict[str, Array]]:
    """Layer → ``steps`` (S,), ``centers`` (S, K + 2), ``temperature`` (S,) and ``scales`` (S, K) of the run."""
    rows = [row for row in read_metrics(run / METRICS) if any(map(_CENTER.fullmatch, row))]
    borders: dict[str, int] = {}
    for match in filter(None, (_CENTER.fullmatch(key) for row in rows for key in row)):
        borders[match[1]] = max(int(match[2]), borders.get(match[1], 0))  # K + 1

    def values(layer: str, names: Iterable[str]) -> Array:
        keys = [f"receptive_field/{layer}/{name}" for name in names]
        return np.array([[row.get(key, np.nan) for key in keys] for row in rows], float)

    return {
        layer: {
            "steps": np.array([row["step"] for row in rows], float),
            "centers": values(layer, (f"center_{k}" for k in range(border + 1))),
            "temperature": values(layer, ["temperature"])[:, 0],
            "scales": values(layer, (f"scale_{k}" for k in range(1, border))),
        }
        for layer, border in borders.items()
    }
