"""Networks and inputs that several test files use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from malleable.layers import DepthConv2d


class Unit(nn.Module):
    """A residual unit with a bottleneck's order of convolutions."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels_in, channels, 1)
        self.spatial = nn.Conv2d(channels, channels, 3, stride, 1)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.spatial(torch.relu(self.reduce(x))) + self.shortcut(x))


class Tiny(nn.Module):
    """A stem at rate 2 and two stages, 8 and 12 channels, of two residual units each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.stage1 = nn.Sequential(Unit(8, 8, 1), Unit(8, 8, 1))
        self.stage2 = nn.Sequential(Unit(8, 12, 2), Unit(12, 12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.stage2(self.stage1(self.stem(x)))


def lively(net: nn.Module, seed: int = 0) -> nn.Module:
    """``net`` in eval mode with every norm, bias and layer scale drawn anew: a branch scaled by 0 would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, DepthConv2d):  # its receptive field and gain belong together
                continue
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point() and tensor.numel() == max(tensor.shape, default=1):
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.6 + 0.6)
    return net.eval()


def scene(batch: int = 2, height: int = 64, width: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """An image batch and a depth map of steps and slopes, some of it missing."""
    generator = torch.Generator().manual_seed(seed)
    rgb = torch.randn(batch, 3, height, width, generator=generator)
    slope = torch.linspace(1, 3, width).expand(batch, 1, height, width)
    steps = torch.randint(0, 4, (batch, 1, 1 + height // 8, 1 + width // 8), generator=generator).float()
    steps = steps.repeat_interleave(8, 2).repeat_interleave(8, 3)[..., :height, :width]
    depth = slope + steps
    depth[:, :, ::7, ::5] = 0
    return rgb, depth


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()
