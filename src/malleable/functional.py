"""This is the layers' mathematics as functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from malleable.assign import depth_aware_assign, hard_assign, malleable_assign, malleable_logits
from malleable.geometry import Differences, Geometry
from malleable.ops import depth_conv2d
from malleable.ops.window import Pair, Window

__all__ = [
    "depth_aware_assign",
    "depth_conv2d",
    "hard_assign",
    "malleable_assign",
    "malleable_logits",
    "relative_depth",
]


def relative_depth(
    depth: Tensor,
    focal: float | Tensor,
    kernel_size: Pair,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    size: Sequence[int] | None = None,
) -> Differences:
    """Compute the relative depth differences d that a convolution sees (paper, Eq. 1), positive for a nearer neighbour.

    Args:
        depth: (N, 1, H, W) metres at image resolution.
        focal: pixels of that image, a number or (N,).
        kernel_size, stride, padding, dilation: of the convolution.
        size: (height, width) of the convolution's input map; the image's own by default.

    Returns:
        ``value`` (N, taps, Hout, Wout), 0 where unknown, and ``valid``, a bool mask of the same shape.
    """
    window = Window.of(kernel_size, stride, padding, dilation)
    geometry = Geometry(depth, focal)
    dtype = torch.promote_types(depth.dtype, torch.float32)
    height, width = depth.shape[-2:] if size is None else size
    if min(window.output_size((height, width))) < 1:
        raise ValueError(f"a map of {height}×{width} is smaller than kernel_size {kernel_size}: add padding")
    return geometry.relative_depth(window, (height, width), dtype)
