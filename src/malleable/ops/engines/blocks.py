"""This CPU engine needs no compiler: it weighs patches of a few rows at a time for one matrix product.

Patches are at most 8 MiB, unless one row is more, and are made again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from malleable.ops.engines.plain import Gradients, Needs
from malleable.ops.window import Window

name = "blocks"

_PATCH_BYTES = 8 * 2**20


def can_run(x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> str | None:
    if x.device.type != "cpu":
        return f"it runs on the CPU, x is on {x.device}"
    if groups != 1:
        return f"it takes groups=1, not {groups}"
    if x.dtype not in (torch.float32, torch.float64):
        return f"it takes float32 and float64, x is {x.dtype}"
    return None


def forward(x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> Tensor:
    kernels, out_channels = assign.shape[1], weight.shape[0] // assign.shape[1]
    y = x.new_empty(x.shape[0], out_channels, *assign.shape[-2:])
    w = _matrix(weight, kernels)  # (O, taps·K·C)
    for n, rows, patches in _blocks(x, assign, window):
        y[n, :, rows] = (w @ _weigh(patches, assign[n, :, :, rows])).view(out_channels, -1, y.shape[-1])
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, needs: Needs
) -> Gradients:
    kernels, channels = assign.shape[1], x.shape[1]
    left, right, top, bottom = window.padding
    padded = x.new_zeros(*x.shape[:2], x.shape[2] + top + bottom, x.shape[3] + left + right)
    w = _matrix(weight, kernels)
    grad_w, grad_assign = torch.zeros_like(w), torch.zeros_like(assign)
    for n, rows, patches in _blocks(x, assign, window):
        g, gy = assign[n, :, :, rows], grad[n, :, rows].flatten(1)
        if needs[1]:
            grad_w.addmm_(gy, _weigh(patches, g).T)
        if needs[0] or needs[2]:
            z = (w.T @ gy).view(window.taps, kernels, channels, -1, grad.shape[-1])  # d loss / d (assign · x)
            if needs[2]:
                for p, patch in enumerate(patches):
                    grad_assign[n, :, p, rows] = (z[p] * patch).sum(1)
            if needs[0]:
                first = rows.start * window.stride[0]
                views = window.views_of_padded(padded[n, :, first:], (z.shape[3], z.shape[4]))
                for p, view in enumerate(views):
                    for k in range(kernels):
                        view.addcmul_(z[p, k], g[k, p])
    grad_x = padded[..., top : top + x.shape[2], left : left + x.shape[3]]
    grad_weight = grad_w.view(-1, window.taps, kernels, channels).permute(2, 0, 3, 1).reshape_as(weight)
    a, b, c = (t if need else None for t, need in zip((grad_x, grad_weight, grad_assign), needs, strict=True))
    return a, b, c


def _blocks(x: Tensor, assign: Tensor, window: Window) -> Iterator[tuple[int, slice, list[Tensor]]]:
    """Yield samples, output rows and their patches, one (C, rows, Wout) a tap."""
    kernels, taps, height, width = assign.shape[1:]
    row_bytes = x.element_size() * kernels * taps * x.shape[1] * width
    step = max(1, _PATCH_BYTES // max(row_bytes, 1))
    for n in range(x.shape[0]):
        padded = F.pad(x[n], window.padding)
        for first in range(0, height, step):
            rows = slice(first, min(first + step, height))
            views = window.views_of_padded(padded[..., first * window.stride[0] :, :], (rows.stop - first, width))
            yield n, rows, list(views)


def _weigh(patches: list[Tensor], g: Tensor) -> Tensor:
    """Weigh patches (C, h, w), one a tap, by g (K, taps, h, w), as a matrix (taps·K·C, h·w)."""
    weighted = g.new_empty(len(patches), g.shape[0], *patches[0].shape)
    for p, patch in enumerate(patches):
        torch.mul(patch, g[:, p, None], out=weighted[p])
    return weighted.flatten(3).flatten(0, 2)


def _matrix(weight: Tensor, kernels: int) -> Tensor:
    """Lay weights (K·O, C, kh, kw) out as a matrix (O, taps·K·C)."""
    return torch.unflatten(weight.flatten(2), 0, (kernels, -1)).permute(1, 3, 0, 2).flatten(1)
