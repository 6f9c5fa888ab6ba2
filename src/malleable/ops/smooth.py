"""Depth without the noise of single pixels, and with the edges it has."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def smooth(depth: Tensor) -> Tensor:
    """Return the median of every 3 × 3 pixels of depth (N, 1, H, W); beyond its border the outermost are repeated."""
    around = F.pad(depth, (1, 1, 1, 1), mode="replicate")
    low, middle, high = _sorted(around[..., :-2, :], around[..., 1:-1, :], around[..., 2:, :])
    # Of nine in three sorted columns, the median is that of the greatest low, the median middle and the least high one.
    greatest = torch.maximum(torch.maximum(low[..., :-2], low[..., 1:-1]), low[..., 2:])
    least = torch.minimum(torch.minimum(high[..., :-2], high[..., 1:-1]), high[..., 2:])
    _, median, _ = _sorted(middle[..., :-2], middle[..., 1:-1], middle[..., 2:])
    return _sorted(greatest, median, least)[1]


def _sorted(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    return torch.minimum(low, c), torch.maximum(low, torch.minimum(high, c)), torch.maximum(high, c)
