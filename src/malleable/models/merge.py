"""A segmentation head is made of these: convolution with normalisation, and blocks that merge the stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNormAct(nn.Sequential):
    """Applies a convolution of odd kernel size that keeps the map's size, batch norm, and ReLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int = 1) -> None:
        padding = dilation * (kernel_size // 2)
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel_size, padding=padding, dilation=dilation, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )


class ResidualUnit(nn.Module):
    """Computes RefineNet's residual convolution unit, with batch norm: x + 3×3(ReLU(3×3(ReLU(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNormAct(channels, channels, 3)
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to the same shape."""
        refined: Tensor = self.second(self.first(F.relu(x)))
        return x + refined


class Merge(nn.Module):
    """Merges stages (paper, 4.2), after RefineNet and RDFNet; docs/models.md has a drawing.

    Every stage is brought to ``channels`` and refined by a residual unit. Then, from the coarsest stage to the finest,
    the two maps that meet pass a 3×3 convolution each, are summed at the finer size and refined again. The pooling
    chain of RefineNet is left out: the ASPP beside this block already gathers context.

    Args:
        stage_channels: of the stages, finest first.
        channels: of the merged map.
    """

    def __init__(self, stage_channels: Sequence[int], channels: int) -> None:
        super().__init__()
        self.adapt = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, channels, 1, bias=False), nn.BatchNorm2d(channels), ResidualUnit(channels))
            for c in stage_channels
        )
        steps = range(len(stage_channels) - 1)
        self.fine, self.coarse = (
            nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in steps) for _ in range(2)
        )
        self.refine = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(channels), ResidualUnit(channels)) for _ in steps)

    def forward(self, stages: Sequence[Tensor]) -> Tensor:
        """Merge maps (N, C_i, H_i, W_i), finest first, into (N, channels, H_0, W_0)."""
        maps = [adapt(stage) for adapt, stage in zip(self.adapt, stages, strict=True)]
        merged: Tensor = maps.pop()
        for fine, coarse, refine in zip(self.fine, self.coarse, self.refine, strict=True):
            finer = maps.pop()
            merged = refine(fine(finer) + resize(coarse(merged), finer))
        return F.relu(merged)


class DilatedBottleneck(nn.Module):
    """Computes ResNet's bottleneck, its 3×3 dilated: ReLU(x + 1×1(3×3(1×1(x)))), a quarter of the channels inside."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        inner = max(1, channels // 4)
        self.inner = nn.Sequential(ConvNormAct(channels, inner, 1), ConvNormAct(inner, inner, 3, dilation))
        self.outer = nn.Sequential(nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to the same shape."""
        refined: Tensor = self.outer(self.inner(x))
        return F.relu(x + refined)


class ReleasedMerge(nn.Module):
    """Merges stages as the authors' released code does: all at the second's size, concatenated, two bottlenecks.

    Args:
        stage_channels: of res2 … res5.
        channels: of the merged map.
    """

    def __init__(self, stage_channels: Sequence[int], channels: int) -> None:
        super().__init__()
        self.adapt = nn.ModuleList(ConvNormAct(c, channels, 3) for c in stage_channels)
        self.fuse = nn.Sequential(
            ConvNormAct(channels * len(stage_channels), channels, 3),
            DilatedBottleneck(channels, 2),
            DilatedBottleneck(channels, 2),
        )

    def forward(self, stages: Sequence[Tensor]) -> Tensor:
        """Merge maps (N, C_i, H_i, W_i), finest first, into (N, channels, H_1, W_1)."""
        maps = [adapt(resize(stage, stages[1])) for adapt, stage in zip(self.adapt, stages, strict=True)]
        merged: Tensor = self.fuse(torch.cat(maps, dim=1))
        return merged


class Upsample(nn.Sequential):
    """Doubles the size of a map, then applies a 3×3 convolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), ConvNormAct(in_channels, out_channels, 3)
        )


def resize(x: Tensor, like: Tensor) -> Tensor:
    """Resize ``x`` (N, C, H, W) bilinearly to the height and width of ``like``."""
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)
