"""Compare what a network says about every sample of a data set with the labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor, nn

from malleable.data.sample import SampleDataset
from malleable.inference.confusion import Confusion
from malleable.inference.probabilities import probabilities
from malleable.models.modes import eval_mode
from malleable.progress import parallel_map, with_progress
from malleable.runs.scores import Protocol, Scores


def evaluate_network(
    net: nn.Module,
    dataset: SampleDataset,
    protocol: Protocol | None = None,
    *,
    split: str | None = None,
    step: int | None = None,
    workers: int = 1,
    progress: bool = False,
    after_each: Callable[[], None] | None = None,
) -> Scores:
    """Compare ``net``'s classes with the labels of every sample, at the labels' size.

    In a process group every process takes its share of the samples and all get the same scores. ``net`` is evaluated
    in eval mode, and each of its modules left in the mode it was in.

    Args:
        net: called as ``net(image, depth=..., focal=...)``; its logits have one channel per class of ``dataset``.
        protocol: how images are shown to it; whole, at one scale by default.
        split: its name in the scores; the data set's own if it knows it.
        step: of the network's training, for the scores.
        workers: threads that read samples ahead.
        progress: show how far it has come.
        after_each: called after each sample, equally often in all processes of a group; may raise to leave.
    """
    protocol = protocol or Protocol()
    split = str(getattr(dataset, "split", "")) if split is None else split
    rank, processes = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share = range(rank, len(dataset), processes)
    samples = parallel_map(dataset.__getitem__, share, workers)
    if progress and rank == 0:
        samples = with_progress(samples, len(share), f"{dataset.name}/{split}" if split else dataset.name)
    device = next((parameter.device for parameter in net.parameters()), torch.device("cpu"))
    confusion = Confusion(len(dataset.classes), device)
    with closing(samples), eval_mode(net):
        for sample in samples:
            likely = probabilities(net, sample, protocol)  # (C, H, W)
            if len(likely) != len(dataset.classes):
                raise ValueError(
                    f"the network knows {len(likely)} classes but {dataset.name} has {len(dataset.classes)}; "
                    "evaluate it on a data set with the classes it was trained for"
                )
            labels = likely.max(0).indices  # ten times faster than argmax on a CPU
            confusion.update(labels, sample.label.as_subclass(Tensor).to(device))
            if after_each is not None:
                after_each()
        if after_each is not None and len(share) < math.ceil(len(dataset) / processes):
            after_each()  # others have one sample more
    confusion.reduce()
    if not confusion.counts.any():
        raise ValueError(f"{dataset.name}{f'/{split}' if split else ''} has no labelled pixel, so there are no scores")
    return Scores(
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


def _percent(classes: tuple[str, ...], values: Tensor) -> dict[str, float | None]:
    pairs = zip(classes, (100 * values).tolist(), strict=True)
    return {name: None if math.isnan(value) else value for name, value in pairs}
