"""How tensors lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def is_channels_last(t: Tensor) -> bool:
    """Whether a 4-D tensor is laid out channels-last and nothing else."""
    return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def output_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """The layout nn.Conv2d gives its output: channels-last if its input or its weights are."""
    return torch.channels_last if is_channels_last(x) or is_channels_last(weight) else torch.contiguous_format
