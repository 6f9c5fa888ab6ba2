"""Figures from arrays: what receptive fields are, what they do, and how a run went. Nothing is read, nothing is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from malleable.figures_style import DASHES, LINES, Array, new_figure, save, styled

__all__ = ["save", "training"]

_CURVES = {"loss": "training loss", "lr": "learning rate", "val/miou": "validation mIoU (%)"}


@styled
def training(runs: Mapping[str, Mapping[str, tuple[Array, Array]]]) -> Figure:
    """How runs went.

    Args:
        runs: shown name → of ``loss``, ``lr`` and ``val/miou`` those there are → (steps, values), both (S,).
    """
    kinds = [kind for kind in _CURVES if any(kind in curves for curves in runs.values())]
    figure = new_figure(3.6 * max(1, len(kinds)), 3.2 + 0.22 * (len(runs) > 1) * -(-len(runs) // 3))
    panels: Sequence[Any] = figure.subplots(1, max(1, len(kinds)), squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=False):
        for number, (name, curves) in enumerate(runs.items()):
            if kind in curves:
                steps, values = curves[kind]
                marker = "o" if kind == "val/miou" or len(steps) == 1 else None
                panel.plot(steps, values, color=LINES[number % len(LINES)], marker=marker, markersize=4, label=name,
                           linestyle=DASHES[number // len(LINES) % len(DASHES)])  # fmt: skip
        panel.set(title=_CURVES[kind], xlabel="step")
        panel.set_ylim(bottom=0)
    if len(runs) > 1:
        _legend(figure, *panels[0].get_legend_handles_labels())
    return figure


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int = 3) -> None:
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)))
