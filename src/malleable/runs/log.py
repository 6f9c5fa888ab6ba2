"""What one sees of a run: progress on the terminal, metrics.jsonl, and TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from malleable.data.sample import Sample
from malleable.files import write_whole
from malleable.layers import MalleableConv2d

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
SCORE = "val/miou"


class Journal:
    """Scalars to metrics.jsonl and TensorBoard, images to TensorBoard. One process of a run keeps it.

    Args:
        folder: of the run. Rows after ``start`` were written by steps that are about to be made again, and go.
    """

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / METRICS
        rows = [row for row in read_metrics(self.path) if row["step"] <= start]
        write_whole(self.path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        self.scores = {row["step"]: row[SCORE] for row in rows if SCORE in row}
        self._board = SummaryWriter(str(folder / TENSORBOARD), purge_step=start + 1 if start else None)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One row of metrics.jsonl, and the same numbers to TensorBoard. JSON has no word for NaN: it is left out."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        if SCORE in values:
            self.scores[step] = values[SCORE]

    def is_best(self, step: int) -> bool:
        """Whether no earlier validation was as good as that of ``step``."""
        return all(score < self.scores[step] for other, score in self.scores.items() if other < step)

    def image(self, step: int, name: str, image: Tensor) -> None:
        """(3, H, W) uint8."""
        self._board.add_image(name, image, step)

    def close(self) -> None:
        self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The numbers of each row of a metrics.jsonl.

    A line that is no object with an integer ``step``, such as one that a killed run left half-written, is not there.
    """
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append({key: value for key, value in row.items() if isinstance(value, int | float)})
    return rows


def scored(folder: Path, step: int) -> bool:
    """Whether the run in ``folder`` was validated after ``step``."""
    return any(SCORE in row and row["step"] == step for row in read_metrics(folder / METRICS))


def receptive_fields(net: nn.Module) -> dict[str, float]:
    """Centers, temperature and scales of every malleable layer of ``net``, by name."""
    numbers: dict[str, float] = {}
    for name, layer in net.named_modules():
        if isinstance(layer, MalleableConv2d):
            prefix = f"receptive_field/{name.removeprefix('backbone.model.')}"
            numbers |= {f"{prefix}/center_{k}": value for k, value in enumerate(layer.centers.tolist())}
            numbers[f"{prefix}/temperature"] = layer.temperature.item()
            numbers |= {f"{prefix}/scale_{k}": value for k, value in enumerate(layer.scales.tolist(), start=1)}
    return numbers


def side_by_side(sample: Sample, predicted: Tensor, palette: Sequence[Sequence[int]]) -> Tensor:
    """Image, label and prediction (H, W) in the palette's colours, beside each other: (3, H, 3·W) uint8."""
    colours = torch.zeros(256, 3, dtype=torch.uint8)  # unlabelled pixels are black
    colours[: len(palette)] = torch.tensor(palette, dtype=torch.uint8)
    maps = [colours[labels].permute(2, 0, 1) for labels in (sample.label.as_subclass(Tensor), predicted.cpu())]
    return torch.cat([sample.image.as_subclass(Tensor), *maps], dim=2)
