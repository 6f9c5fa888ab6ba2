"""What a network reached and how it was measured: results.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from malleable.files import read_json

RESULTS = "results.json"

SCORES = {"miou": "mIoU", "pixel_accuracy": "pixel accuracy", "mean_accuracy": "mean accuracy"}
"""Tables call the scores of a labelling so."""

BEYOND = ("stress", "splits")
"""Scores hold mIoU under these names for other depth and other images than their own."""

_REMARKS = {"nyudv2-half": "half-size, 8-bit-recovered depth"}


@dataclass(frozen=True)
class Protocol:
    """Says how an image is shown to a network.

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
        """Say what must stand beside a score: ``single scale``, or ``multi-scale 0.75, 1, 1.25 + flip``."""
        factors = ", ".join(f"{scale:g}" for scale in self.scales)
        kind = "multi-scale " + factors if len(self.scales) > 1 else "single scale"
        if len(self.scales) == 1 and self.scales != (1.0,):
            kind += f" {factors}"
        text = kind + (" + flip" if self.flip else "")
        if self.window is None:
            return text
        overlap = "" if self.overlap == Protocol.overlap else f" that overlap by {self.overlap:.3g}"
        return f"{text}, windows of {self.window[0]}×{self.window[1]}{overlap}"


@dataclass(frozen=True)
class Scores:
    """Says how good a network is, in percent (NaN where not measured), and all one must know to compare it.

    Args:
        iou, accuracy: by class; None for a class absent from labels and predictions, or from labels.
        source: the file, or the part of training, that the scores are from.
        confusion: (C, C) pixels by true class (row) and predicted class (column); None where it was not kept.
        stress: mIoU by the name of a fault of depth, where that was measured.
        splits: mIoU by the name of another split of the data, where that was measured.
    """

    miou: float
    pixel_accuracy: float
    mean_accuracy: float
    iou: Mapping[str, float | None]
    dataset: str
    split: str
    protocol: Protocol
    step: int | None
    source: str = RESULTS
    accuracy: Mapping[str, float | None] = field(default_factory=dict)
    confusion: Tensor | None = None
    stress: Mapping[str, float] = field(default_factory=dict)
    splits: Mapping[str, float] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        """Say what the network was measured on, and how; scores of one setting may be compared."""
        remark = f" ({_REMARKS[self.dataset]})" if self.dataset in _REMARKS else ""
        return f"{self.dataset} {self.split}{remark}, {self.protocol}"

    def to_dict(self) -> dict[str, Any]:
        """Give what ``results.json`` holds. ``window`` and ``overlap`` are there only if there was one."""
        protocol = self.protocol
        return {
            **{name: getattr(self, name) for name in SCORES},
            "iou": dict(self.iou),
            "dataset": self.dataset,
            "split": self.split,
            "scales": list(protocol.scales),
            "flip": protocol.flip,
            "step": self.step,
            **({} if protocol.window is None else {"window": list(protocol.window), "overlap": protocol.overlap}),
            **self.beyond(),
        }

    def beyond(self) -> dict[str, dict[str, float]]:
        """Give what was measured with faults and on other splits, as files have it."""
        return {name: dict(found) for name in BEYOND if (found := getattr(self, name))}

    @classmethod
    def read(cls, path: Path) -> Scores:
        """Read what ``malleable evaluate`` wrote."""
        return cls.of(read_json(path), path)

    @classmethod
    def of(cls, values: Any, path: Path) -> Scores:
        """Make the scores again of which :meth:`to_dict` gave ``values``; errors name the file they stood in."""
        try:
            miou, pixels, classes = (float(values[name]) for name in SCORES)
            iou = {str(name): None if value is None else float(value) for name, value in values["iou"].items()}
            window = values.get("window")
            windows = () if window is None else (tuple(window), values.get("overlap", Protocol.overlap))
            protocol = Protocol(tuple(values["scales"]), values["flip"], *windows)
            step = None if values["step"] is None else int(values["step"])
            beyond: dict[str, Any] = {
                name: {str(key): float(value) for key, value in values.get(name, {}).items()} for name in BEYOND
            }
            setting = (str(values["dataset"]), str(values["split"]), protocol, step)
            return cls(miou, pixels, classes, iou, *setting, **beyond)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path} is not what malleable evaluate writes ({error}); evaluate the run again"
            ) from error
