"""What one sees of a run: progress on the terminal, metrics.jsonl, and TensorBoard."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from malleable.data.parallel import console
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


class Progress:
    """How far a run has come: a bar on a terminal, a line at every report elsewhere. Both go to stderr.

    Args:
        total: steps of the run.
        start: steps made before.
        batch_size: images in a step.
        shown: False in all processes but one.
    """

    def __init__(self, total: int, start: int, batch_size: int, shown: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.total, self.batch_size, self.shown = total, batch_size, shown
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Bar(*columns, console=console()) if shown and console().is_terminal else None
        self._task = self._bar.add_task("", total=total, completed=start) if self._bar else None
        self.restart()

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def restart(self) -> None:
        """Measure loss and speed anew."""
        self._losses: list[float] = []
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in here does not count as training time."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def advance(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step)

    def report(self, step: int, lr: float) -> dict[str, float]:
        """Mean loss and speed since the last report, shown and returned."""
        seconds = (time.perf_counter() - self._since) / len(self._losses)
        loss, speed = sum(self._losses) / len(self._losses), self.batch_size / seconds
        text = f"loss {loss:.4f}  lr {lr:.2e}  {speed:.1f} images/s"
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=text)
        else:
            self.say(
                f"step {step}/{self.total}  {text}  {timedelta(seconds=round(seconds * (self.total - step)))} left"
            )
        self.restart()
        return {"loss": loss, "lr": lr, "images_per_second": speed}

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self.shown:
            print(text, file=sys.stderr, flush=True)
