"""Count what a labelling gets right and wrong, in whole numbers, and score it."""

from __future__ import annotations

import torch
from torch import Tensor

from malleable.data.tv_tensors import IGNORE


class Confusion:
    """Counts pixels by true class (row) and predicted class (column). Pixels labelled 255 do not count.

    Whole numbers, so the sum over images or processes is exact and does not depend on their order.
    """

    def __init__(self, classes: int, device: torch.device | str | None = None) -> None:
        if classes < 1:
            raise ValueError(f"classes must be at least 1, got {classes}")
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)

    def update(self, predicted: Tensor, label: Tensor) -> None:
        """Count the pixels of class maps of one shape, both of whole numbers; ``label`` is 255 where unknown."""
        if predicted.shape != label.shape:
            raise ValueError(
                f"predicted must have the label's shape {tuple(label.shape)}, got {tuple(predicted.shape)}"
            )
        classes = len(self.counts)
        known = label != IGNORE
        truth, guess = label[known].to(torch.int64), predicted[known].to(torch.int64)
        for name, values in (("label", truth), ("predicted", guess)):
            if values.numel() and (int(values.min()) < 0 or int(values.max()) >= classes):
                raise ValueError(
                    f"{name} must hold classes 0..{classes - 1}, got {int(values.min())}..{int(values.max())}"
                )
        self.counts += torch.bincount(truth * classes + guess, minlength=classes**2).view(classes, classes)

    def reduce(self) -> None:
        """Add up, exactly, the counts of all processes of the default group, if there is one."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.counts)

    @property
    def iou(self) -> Tensor:
        """Give intersection over union, (C,) float64 of 0..1; NaN for a class in neither labels nor predictions."""
        counts = self.counts.cpu()  # Apple's GPUs have no float64
        hits = counts.diagonal().double()
        return hits / (counts.sum(0) + counts.sum(1) - hits)

    @property
    def accuracy(self) -> Tensor:
        """Give the share of each class's pixels that were found, (C,) float64; NaN for a class without pixels."""
        counts = self.counts.cpu()
        return counts.diagonal().double() / counts.sum(1)

    @property
    def miou(self) -> float:
        """Average :attr:`iou` over the classes that have one."""
        return float(self.iou.nanmean())

    @property
    def mean_accuracy(self) -> float:
        """Average :attr:`accuracy` over the classes that have one."""
        return float(self.accuracy.nanmean())

    @property
    def pixel_accuracy(self) -> float:
        """Give the share of all labelled pixels that got their class."""
        counts = self.counts.cpu()
        return float(counts.diagonal().sum().double() / counts.sum())
