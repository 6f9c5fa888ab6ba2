"""How a network was measured, and what it reached: results.json."""

from __future__ import annotations

import csv as csv_format
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Protocol:
    """How an image is shown to a network.

    Args:
        scales: factors on the image's size. The camera is rescaled with the image.
        flip: show every scale mirrored as well.
        window: (height, width) of windows that slide over the image, None for the whole image at once.
        overlap: the least share of a window that its neighbour sees too.
    """

    scales: tuple[float, ...] = (1.0,)
    flip: bool = False
    window: tuple[int, int] | None = None
    overlap: float = 1 / 3

    def __post_init__(self) -> None:
        if not self.scales or not all(0 < scale < math.inf for scale in self.scales):
            raise ValueError(f"scales must be positive factors, at least one, got {list(self.scales)}")
        if self.window is not None and (len(self.window) != 2 or min(self.window) < 1):
            raise ValueError(f"window must be (height, width), both at least 1, got {self.window}")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"overlap must be at least 0 and below 1, got {self.overlap}")

    def __str__(self) -> str:
        """What must stand beside a figure: ``single scale``, or ``multi-scale 0.75, 1, 1.25 + flip``."""
        factors = ", ".join(f"{scale:g}" for scale in self.scales)
        kind = "multi-scale " + factors if len(self.scales) > 1 else "single scale"
        if len(self.scales) == 1 and self.scales != (1.0,):
            kind += f" {factors}"
        text = kind + (" + flip" if self.flip else "")
        return text if self.window is None else f"{text}, windows of {self.window[0]}×{self.window[1]}"


FIGURES = {"miou": "mIoU", "pixel_accuracy": "pixel accuracy", "mean_accuracy": "mean accuracy"}
"""The figures of a labelling → what tables call them."""


@dataclass(frozen=True)
class Results:
    """Figures in percent, and all one must know to compare them.

    ``iou`` and ``accuracy`` have an entry per class: None for a class absent from labels and predictions, or from
    labels. ``confusion``: (C, C) pixels by true class (row) and predicted class (column).
    """

    miou: float
    pixel_accuracy: float
    mean_accuracy: float
    iou: dict[str, float | None]
    accuracy: dict[str, float | None]
    confusion: Tensor
    dataset: str
    split: str
    protocol: Protocol
    step: int | None

    @property
    def scales(self) -> tuple[float, ...]:
        return self.protocol.scales

    @property
    def flip(self) -> bool:
        return self.protocol.flip

    def to_dict(self) -> dict[str, Any]:
        """What ``results.json`` holds. ``window`` is there only if there was one."""
        window = self.protocol.window
        return {
            "miou": self.miou,
            "pixel_accuracy": self.pixel_accuracy,
            "mean_accuracy": self.mean_accuracy,
            "iou": self.iou,
            "dataset": self.dataset,
            "split": self.split,
            "scales": list(self.scales),
            "flip": self.flip,
            "step": self.step,
            **({} if window is None else {"window": list(window)}),
        }

    def to_csv(self) -> str:
        """A line per class, one of the means and one over all pixels, each with the setting it was measured in."""
        means = [("mean", self.miou, self.mean_accuracy), ("all pixels", None, self.pixel_accuracy)]
        lines = [(name, self.iou[name], self.accuracy[name]) for name in self.iou]
        setting = (self.dataset, self.split, str(self.protocol), self.step)
        return _csv(["dataset", "split", "setting", "step", "class", "iou", "accuracy"],
                    ([*setting, *line] for line in lines + means))  # fmt: skip

    def confusion_csv(self) -> str:
        """Pixels by true class (line) and predicted class (column)."""
        names = list(self.iou)
        title = f"{self.dataset} {self.split}, {self.protocol}: true class"
        return _csv([title, *names], ([name, *row] for name, row in zip(names, self.confusion.tolist(), strict=True)))

    def print(self) -> None:
        """A table on standard output."""
        from rich.console import Console
        from rich.table import Table

        step = "" if self.step is None else f", step {self.step}"
        table = Table(title=f"{self.dataset} {self.split}{step}: {self.protocol}", caption="percent")
        for heading in ("class", "IoU", "accuracy"):
            table.add_column(heading, justify="left" if heading == "class" else "right", no_wrap=True)
        for name in self.iou:
            table.add_row(name, _shown(self.iou[name]), _shown(self.accuracy[name]))
        table.add_section()
        table.add_row("mean", _shown(self.miou), _shown(self.mean_accuracy))
        table.add_row("all pixels", "", _shown(self.pixel_accuracy))
        Console(markup=False, emoji=False).print(table)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _csv(header: list[str], lines: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    writer = csv_format.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return text.getvalue()
