"""Losses whose value for a batch does not depend on how the batch is shared between devices or cut into parts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from malleable.data.tv_tensors import IGNORE
from malleable.runs.config import TrainConfig

# From so many classes on, logits in channels_last are faster as one row a pixel than copied into planes. The gradient
# keeps their order, in which PyTorch runs bilinear enlarging backward several times as fast.
_WIDE = 16


class CrossEntropy:
    """Takes cross entropy; the loss of a batch is the mean over all its labelled pixels."""

    def weight(self, label: Tensor) -> Tensor:
        """Give each image's share (N,) of what the sum of :meth:`__call__` over images is to be divided by."""
        return (label != IGNORE).sum((1, 2)).float()

    def __call__(self, logits: Tensor, label: Tensor) -> Tensor:
        """Sum over each image's labelled pixels: logits (N, C, H, W), label (N, H, W) → (N,)."""
        return _per_pixel(logits, label).sum((1, 2))


class BootstrappedCrossEntropy:
    """Takes cross entropy over the hard pixels only (Wu, Shen and van den Hengel, 2016).

    A pixel is hard if its class has a probability below ``threshold``. Where an image has fewer hard pixels than
    ``floor``, a share of its labelled ones, the hardest up to that number are taken. Each image is averaged over its
    own hard pixels, and the loss of a batch is the mean over its labelled images.
    """

    def __init__(self, threshold: float = 0.7, floor: float = 0.0625) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"bootstrap_threshold must be a probability above 0, at most 1, got {threshold}")
        if not 0 < floor <= 1:
            raise ValueError(f"bootstrap_floor must be a share above 0, at most 1, got {floor}")
        self.threshold, self.floor = threshold, floor

    def weight(self, label: Tensor) -> Tensor:
        """Give 1 for an image with labelled pixels, 0 for one without: label (N, H, W) → (N,)."""
        return (label != IGNORE).any(2).any(1).float()

    def __call__(self, logits: Tensor, label: Tensor) -> Tensor:
        """Average over each image's hard pixels: logits (N, C, H, W), label (N, H, W) → (N,)."""
        losses, labelled = _per_pixel(logits, label).flatten(1), (label != IGNORE).flatten(1)  # (N, H·W)
        ranked = torch.where(labelled, losses, -1.0).sort(dim=1, descending=True).values  # unlabelled pixels last
        hard = (ranked > -math.log(self.threshold)).sum(1)
        least = (labelled.sum(1) * self.floor).ceil().long()
        kept = torch.maximum(hard, least)  # (N,)
        chosen = torch.arange(ranked.shape[1], device=ranked.device) < kept[:, None]
        return torch.where(chosen, ranked, 0.0).sum(1) / kept.clamp(min=1)


Loss = CrossEntropy | BootstrappedCrossEntropy


def build_loss(config: TrainConfig) -> Loss:
    """Build the loss that ``config`` names."""
    if config.loss == "bootstrapped":
        return BootstrappedCrossEntropy(config.bootstrap_threshold, config.bootstrap_floor)
    return CrossEntropy()


def _per_pixel(logits: Tensor, label: Tensor) -> Tensor:
    """Give the loss of each pixel, (N, H, W) in float32, 0 where unlabelled."""
    logits = logits.float()
    if logits.shape[1] >= _WIDE and logits.is_contiguous(memory_format=torch.channels_last):
        rows = logits.movedim(1, -1).flatten(0, 2)  # (N·H·W, C), a view
        return F.cross_entropy(rows, label.flatten(), ignore_index=IGNORE, reduction="none").view(label.shape)
    return F.cross_entropy(logits, label, ignore_index=IGNORE, reduction="none")
