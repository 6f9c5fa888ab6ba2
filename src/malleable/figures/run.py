"""``malleable figures``: the figures of a run, or of several beside each other, and their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malleable.data.sample import SampleDataset
from malleable.figures.history import curves
from malleable.figures.portrait import NAMES, Focus, Missing, Portrait, draw_fields, draw_results
from malleable.inference.load import load_trained

if TYPE_CHECKING:  # matplotlib is imported only when something is drawn
    from matplotlib.figure import Figure


def run_figures(
    run: Path, dataset: SampleDataset | None = None, baseline: Path | None = None, samples: Sequence[int] = (0, 1, 2)
) -> dict[str, Figure]:
    """The figures of one run by name, in the order to show them; those it cannot have are not there.

    Args:
        run: its folder, or anything that ``malleable.inference.load.load_trained`` takes.
        dataset: to draw from; the one that the run validated on by default.
        baseline: another run, whose results are shown beside.
        samples: of the data set, for the pictures.
    """
    beside = None
    if baseline is not None:
        with suppress(FileNotFoundError):
            beside = load_trained(baseline)
    drawn = _draw(Portrait(run, dataset, beside, Focus(samples)), NAMES)
    return {name: figure for name, figure in drawn if not isinstance(figure, Missing)}


def comparison_figures(
    runs: Mapping[str, Path], dataset: SampleDataset | None = None, samples: Sequence[int] = (0, 1, 2)
) -> dict[str, Figure]:
    """The figures of several runs beside each other; those they cannot have are not there.

    Args:
        runs: the name to show → as for :func:`run_figures`.
        dataset: to draw from; the one that the last run validated on by default.
        samples: of the data set, for the pictures.
    """
    portraits = {name: Portrait(run, dataset, None, Focus(samples)) for name, run in runs.items()}
    drawn = {}
    for name, draw in (("training", _training), ("receptive_fields", _fields), ("qualitative", _results)):
        try:
            drawn[name] = draw(portraits)
        except Missing:
            continue
    return drawn


def _draw(portrait: Portrait, names: Sequence[str]) -> Iterator[tuple[str, Figure | Missing]]:
    """Each figure, or why there is none."""
    for name in names:
        try:
            yield name, getattr(portrait, name)()
        except Missing as missing:
            yield name, missing


def _training(portraits: Mapping[str, Portrait]) -> Figure:
    from malleable.figures.curves import training

    measured = {name: curves(portrait.folder) for name, portrait in portraits.items()}
    if not any(measured.values()):
        raise Missing("no run has metrics")
    return training(measured)


def _fields(portraits: Mapping[str, Portrait]) -> Figure:
    methods = _having("layers", portraits)
    return draw_fields(methods, *portraits[list(methods)[-1]].place)


def _results(portraits: Mapping[str, Portrait]) -> Figure:
    nets = _having("trained", portraits)
    shown = portraits[list(nets)[-1]]
    classes = len(shown.data.classes)
    return draw_results(shown, {name: net for name, net in nets.items() if len(net.classes) == classes})


def _having(part: str, portraits: Mapping[str, Portrait]) -> dict[str, Any]:
    """Name → ``part`` of the portraits that have it, one at least."""
    found = {}
    for name, portrait in portraits.items():
        with suppress(Missing):
            found[name] = getattr(portrait, part)
    if not found:
        raise Missing(f"none of the runs has {part}")
    return found
