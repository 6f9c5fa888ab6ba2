"""metrics.jsonl, the log of a run: the one place that knows its columns, writes them and reads them back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from malleable.files import write_whole
from malleable.layers import MalleableConv2d
from malleable.models.convert import Converted
from malleable.runs.scores import SCORES

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"

_TRAINING = ("loss", "lr", "images_per_second", "gradient_norm")
_VALIDATION, _IOU, _FIELD = "val/", "val/iou/", "receptive_field/"


@dataclass(frozen=True)
class ReceptiveField:
    """Holds what a malleable layer has learned: ``centers`` (K + 2), ``temperature`` and ``scales`` (K)."""

    centers: tuple[float, ...]
    temperature: float
    scales: tuple[float, ...]

    @classmethod
    def of(cls, layer: MalleableConv2d) -> ReceptiveField:
        return cls(tuple(layer.centers.tolist()), layer.temperature.item(), tuple(layer.scales.tolist()))

    def columns(self, layer: str) -> dict[str, float]:
        """Give the numbers by the names that files give them."""
        return {
            **{f"{layer}/center_{k}": value for k, value in enumerate(self.centers)},
            f"{layer}/temperature": self.temperature,
            **{f"{layer}/scale_{k}": value for k, value in enumerate(self.scales, start=1)},
        }

    @classmethod
    def by_layer(cls, columns: Mapping[str, float]) -> dict[str, ReceptiveField]:
        """Make the receptive fields whose :meth:`columns` these are; a layer without all its numbers is left out."""
        layers: dict[str, dict[str, float]] = {}
        for name, value in columns.items():
            layer, _, part = name.rpartition("/")
            layers.setdefault(layer, {})[part] = value
        found = {}
        for layer, parts in layers.items():
            kernels = sum(part.startswith("scale_") for part in parts)
            names = [*(f"center_{k}" for k in range(kernels + 2)), "temperature"]
            names += [f"scale_{k}" for k in range(1, kernels + 1)]
            if parts.keys() == set(names):
                values = [parts[name] for name in names]
                found[layer] = cls(tuple(values[: kernels + 2]), values[kernels + 2], tuple(values[kernels + 3 :]))
        return found


@dataclass(frozen=True)
class Row:
    """Holds what was measured after ``step``: of training, of a validation, or of both.

    Args:
        training: of loss, lr, images_per_second and gradient_norm those that are known.
        scores: of miou, pixel_accuracy and mean_accuracy those that are known, in percent.
        iou: of each class that occurs, in percent.
        receptive_fields: of each malleable layer, by its name before conversion.
    """

    step: int
    training: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    iou: Mapping[str, float] = field(default_factory=dict)
    receptive_fields: Mapping[str, ReceptiveField] = field(default_factory=dict)

    @property
    def miou(self) -> float | None:
        return self.scores.get("miou")

    def columns(self) -> dict[str, float]:
        """Give the finite numbers by the names that the file gives them; JSON has no word for NaN."""
        fields = {
            f"{_FIELD}{name}": value
            for layer, learned in self.receptive_fields.items()
            for name, value in learned.columns(layer).items()
        }
        scores = {f"{_VALIDATION}{name}": value for name, value in self.scores.items()}
        classes = {f"{_IOU}{name}": value for name, value in self.iou.items()}
        columns = {**self.training, **scores, **classes, **fields}
        return {name: value for name, value in columns.items() if math.isfinite(value)}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Row:
        """Read a line of the file; columns of other names, and those that hold no number, are left out."""
        columns = {name: value for name, value in line.items() if isinstance(value, int | float)}
        return cls(
            line["step"],
            {name: columns[name] for name in _TRAINING if name in columns},
            {name: columns[f"{_VALIDATION}{name}"] for name in SCORES if f"{_VALIDATION}{name}" in columns},
            _under(_IOU, columns),
            ReceptiveField.by_layer(_under(_FIELD, columns)),
        )


class Log:
    """Writes rows to metrics.jsonl and TensorBoard, images to TensorBoard. One process of a run keeps it.

    Rows after ``start`` were written by steps that are about to be made again, and go. ``callback`` gets each row by
    the names that the file gives its numbers.
    """

    def __init__(self, folder: Path, start: int, callback: Callable[[Mapping[str, float]], None] | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path, self._callback = folder / METRICS, callback
        kept = [line for line in _lines(self.path) if line["step"] <= start]
        write_whole(self.path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
        self._board = SummaryWriter(str(folder / TENSORBOARD), purge_step=start + 1 if start else None)

    def write(self, row: Row) -> None:
        columns = row.columns()
        with self.path.open("a") as file:
            file.write(json.dumps({"step": row.step, **columns}) + "\n")
        for name, value in columns.items():
            self._board.add_scalar(name, value, row.step)
        if self._callback is not None:
            self._callback({"step": row.step, **columns})

    def image(self, step: int, name: str, image: Tensor) -> None:
        """Show ``image``, (3, H, W) uint8, in TensorBoard."""
        self._board.add_image(name, image, step)

    def close(self) -> None:
        self._board.close()


def read_log(folder: Path) -> list[Row]:
    """Read the rows of a run's metrics.jsonl, in their order; none if there is no such file.

    A line that is no object with an integer ``step``, such as one that a killed run left half-written, is passed over.
    """
    return [Row.of(line) for line in _lines(folder / METRICS)]


def validations(rows: Iterable[Row]) -> dict[int, float]:
    """Give the mIoU of every validation, by step."""
    return {row.step: row.miou for row in rows if row.miou is not None}


def receptive_fields(net: nn.Module) -> dict[str, ReceptiveField]:
    """Give the receptive field of every malleable layer of ``net``, by its name before conversion."""
    converted = (module for module in net.modules() if isinstance(module, Converted))
    layers = {name: layer for part in converted for name, layer in part.layers().items()}
    return {name: ReceptiveField.of(layer) for name, layer in layers.items() if isinstance(layer, MalleableConv2d)}


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _under(prefix: str, columns: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in columns.items() if name.startswith(prefix)}
