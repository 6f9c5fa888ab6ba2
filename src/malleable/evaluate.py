"""``malleable evaluate``: mIoU and accuracies of a network on a data set, as table, JSON and CSV."""

from __future__ import annotations

import csv as csv_format
import io
import json as json_format
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from malleable.data.opening import open_dataset
from malleable.data.parallel import parallel_map, with_progress
from malleable.data.sample import Sample, SampleDataset
from malleable.files import check_free, write_whole
from malleable.inference import Protocol, probabilities
from malleable.metrics import Confusion
from malleable.trained import load_trained


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

    @classmethod
    def of(
        cls, confusion: Confusion, dataset: SampleDataset, split: str, protocol: Protocol, step: int | None
    ) -> Results:
        return cls(
            miou=100 * confusion.miou,
            pixel_accuracy=100 * confusion.pixel_accuracy,
            mean_accuracy=100 * confusion.mean_accuracy,
            iou=_percent(dataset.classes, confusion.iou),
            accuracy=_percent(dataset.classes, confusion.accuracy),
            confusion=confusion.counts.cpu(),
            dataset=dataset.name,
            split=split,
            protocol=protocol,
            step=step,
        )

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


def evaluate_network(
    net: nn.Module,
    dataset: SampleDataset,
    *,
    scales: tuple[float, ...] = (1.0,),
    flip: bool = False,
    window: tuple[int, int] | None = None,
    overlap: float = 1 / 3,
    split: str | None = None,
    step: int | None = None,
    workers: int = 1,
    progress: bool = False,
    after_each: Callable[[], None] | None = None,
) -> Results:
    """Compare ``net``'s classes with the labels of every sample, at the labels' size.

    In a process group every process takes its share of the samples and all get the same results. ``net`` is evaluated
    in eval mode and left in the mode it was in.

    Args:
        net: called as ``net(image, depth=..., focal=...)``; its logits have one channel per class of ``dataset``.
        scales, flip, window, overlap: see :class:`malleable.inference.Protocol`.
        split: its name in the results; the data set's own if it knows it.
        step: of the network's training, for the results.
        workers: threads that read samples ahead.
        progress: show how far it has come.
        after_each: called after each sample, equally often in all processes of a group; may raise to leave.
    """
    protocol = Protocol(tuple(scales), flip, window, overlap)
    split = str(getattr(dataset, "split", "")) if split is None else split
    rank, processes = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share = range(rank, len(dataset), processes)
    samples: Iterable[Sample] = parallel_map(dataset.__getitem__, share, workers)
    if progress and rank == 0:
        samples = with_progress(samples, len(share), f"{dataset.name}/{split}" if split else dataset.name)
    device = next((parameter.device for parameter in net.parameters()), torch.device("cpu"))
    confusion = Confusion(len(dataset.classes), device)
    training = net.training
    net.eval()
    try:
        for sample in samples:
            scores = probabilities(net, sample, protocol)
            if len(scores) != len(dataset.classes):
                raise ValueError(
                    f"the network knows {len(scores)} classes but {dataset.name} has {len(dataset.classes)}; "
                    "evaluate it on a data set with the classes it was trained for"
                )
            confusion.update(scores.argmax(0), sample.label.as_subclass(Tensor).to(device))
            if after_each is not None:
                after_each()
        if after_each is not None and len(share) < math.ceil(len(dataset) / processes):
            after_each()  # others have one sample more
    finally:
        net.train(training)
    confusion.reduce()
    if not confusion.counts.any():
        raise ValueError(f"{dataset.name}{f'/{split}' if split else ''} has no labelled pixel, so no figure exists")
    return Results.of(confusion, dataset, split, protocol, step)


def _percent(classes: tuple[str, ...], values: Tensor) -> dict[str, float | None]:
    pairs = zip(classes, (100 * values).tolist(), strict=True)
    return {name: None if math.isnan(value) else value for name, value in pairs}


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _csv(header: list[str], lines: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    writer = csv_format.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return text.getvalue()


def evaluate(
    checkpoint: str,
    dataset: str | None = None,
    split: str | None = None,
    scales: tuple[float, ...] = (1.0,),
    flip: bool = False,
    window: tuple[int, int] | None = None,
    overlap: float = 1 / 3,
    out: str | None = None,
    csv: str | None = None,
    confusion: str | None = None,
    json: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    workers: int = 2,
) -> None:
    """Measure mIoU, pixel accuracy, mean accuracy and the IoU of each class.

    Args:
        checkpoint: a checkpoint, a run's folder, or a folder with model.safetensors and config.json.
        dataset: a folder with dataset.json, Cityscapes' tree, rooms or streets; the one it was trained on by default.
        split: of the data set; the one that training validated on by default.
        scales: for multi-scale figures, for example --scales 0.75 1 1.25; the camera is rescaled with the image.
        flip: show every scale mirrored as well; probabilities are averaged.
        window: height and width of a window that slides over the image instead of the whole image at once.
        overlap: the least share of a window that its neighbour sees too.
        out: JSON file to write; results.json in the run's folder by default.
        csv: CSV file to write, a line per class.
        confusion: CSV file to write, the confusion matrix in pixels.
        json: print JSON instead of a table.
        overwrite: replace files that exist.
        device: auto, cpu, cuda or cuda:N.
        workers: threads that read samples ahead.
    """
    protocol = Protocol(scales, flip, window, overlap)
    trained = load_trained(checkpoint, device)
    data = trained.config.data if trained.config is not None else None
    dataset = dataset or (data.root if data is not None else None)
    if dataset is None:
        raise ValueError(f"{checkpoint} does not say what it was trained on; add --dataset FOLDER and --split NAME")
    split = split or (data.val if data is not None else "val")
    results_path = Path(out) if out is not None else trained.run / "results.json" if trained.run is not None else None
    files = [Path(file) for file in (results_path, csv, confusion) if file is not None]
    for file in files:
        check_free(file, overwrite)
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError(f"out, csv and confusion must be different files, got {', '.join(map(str, files))}")
    samples = open_dataset(dataset, split)
    if len(samples.classes) == len(trained.classes) and tuple(samples.classes) != trained.classes:
        print(f"note: the classes of {samples.name} have other names than those of training", file=sys.stderr)
    results = evaluate_network(
        trained.net,
        samples,
        scales=protocol.scales,
        flip=flip,
        window=window,
        overlap=overlap,
        split=split,
        step=trained.step,
        workers=workers,
        progress=True,
    )
    if results_path is not None:
        write_whole(results_path, (json_format.dumps(results.to_dict(), indent=1) + "\n").encode())
    if csv is not None:
        write_whole(Path(csv), results.to_csv().encode())
    if confusion is not None:
        write_whole(Path(confusion), results.confusion_csv().encode())
    if json:
        print(json_format.dumps(results.to_dict(), indent=1))
    else:
        results.print()
