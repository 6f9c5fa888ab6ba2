"""``malleable figures``: collects what figures show from a run, a network and a data set, and has them drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from malleable.data.sample import SampleDataset
from malleable.journal import METRICS, read_metrics

if TYPE_CHECKING:  # matplotlib is imported only when something is drawn
    from matplotlib.figure import Figure

Array = npt.NDArray[Any]


def run_figures(
    run: Path,
    dataset: SampleDataset | None = None,
    baseline: Path | None = None,
    samples: Sequence[int] = (0, 1, 2),
) -> dict[str, Figure]:
    """The figures of one run by name, in the order to show them; those it cannot have are not there."""
    from malleable import figures

    curves = training_curves(run)
    return {"training": figures.training({run.name: curves})} if curves else {}


def comparison_figures(runs: Mapping[str, Path], dataset: SampleDataset | None = None) -> dict[str, Figure]:
    """The figures of several runs, by the names to show them with."""
    from malleable import figures

    curves = {name: training_curves(run) for name, run in runs.items()}
    return {"training": figures.training(curves)} if any(curves.values()) else {}


def training_curves(run: Path) -> dict[str, tuple[Array, Array]]:
    """Of ``loss``, ``lr`` and ``val/miou`` those that ``run``'s metrics.jsonl has → (steps, values)."""
    rows = read_metrics(run / METRICS)
    curves = {}
    for name in ("loss", "lr", "val/miou"):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            steps, values = np.array(points, float).T
            curves[name] = (steps, values)
    return curves
