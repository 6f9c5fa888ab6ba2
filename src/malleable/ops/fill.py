"""Unknown depth from what is known around it, coarser the larger the hole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LEVELS = 8  # of halved maps: holes some hundred pixels wide; what is wider gets the mean


def fill(depth: Tensor, known: Tensor) -> Tensor:
    """Interpolate depth (N, 1, H, W) where it is not ``known``, bool of the same shape; 0 in images without any.

    1 / depth is what is interpolated, because planes are linear in it. Averages of 2 × 2, 4 × 4 … known pixels fill
    what is unknown in the next finer map. A factor of depth is a factor of the result.
    """
    weight = known.to(depth.dtype)
    value = weight / torch.where(known, depth, 1.0)
    levels = [(value, weight)]
    for _ in range(_LEVELS):
        value, weight = (F.avg_pool2d(F.pad(map, (0, 1, 0, 1)), 2) for map in (value, weight))  # ceil(size / 2)
        levels.append((value, weight))
    mean = _ratio(value.sum((2, 3), keepdim=True), weight.sum((2, 3), keepdim=True))
    filled = torch.where(weight > 0, _ratio(value, weight), mean)
    for value, weight in reversed(levels[:-1]):
        height, width = value.shape[-2:]
        filled = F.interpolate(filled, scale_factor=2, mode="bilinear")[..., :height, :width]
        filled = torch.where(weight > 0, _ratio(value, weight), filled)
    return torch.where(known, depth, _ratio(torch.ones_like(filled), filled))


def _ratio(value: Tensor, weight: Tensor) -> Tensor:
    """Divide where there is something to divide by; 0 elsewhere, in the gradient too."""
    some = weight > 0
    return torch.where(some, value / torch.where(some, weight, 1.0), 0.0)
