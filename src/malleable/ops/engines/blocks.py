"""This CPU engine needs no compiler: it weighs patches of a few rows at a time for one matrix product.

Patches are at most 8 MiB, unless one row is more, and are made again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

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
    width = y.shape[-1]
    # A block reads all weights; where these are small, its patches stay in cache.
    step = _rows(x, assign, min(max(weight.nbytes, _PATCH_BYTES // 6), _PATCH_BYTES))
    room = x.new_empty(w.shape[1] * step * width)
    for n, rows, patches in _blocks(x, assign, window, step):
        block = y[n].flatten(1)[:, rows.start * width : rows.stop * width]
        torch.mm(w, _weigh(patches, assign[n, :, :, rows], room), out=block)
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, needs: Needs
) -> Gradients:
    kernels, channels = assign.shape[1], x.shape[1]
    left, right, top, bottom = window.padding
    padded = x.new_zeros(*x.shape[:2], x.shape[2] + top + bottom, x.shape[3] + left + right)
    w = _matrix(weight, kernels)
    grad_w, grad_assign = torch.zeros_like(w), torch.zeros_like(assign)
    step = _rows(x, assign, _PATCH_BYTES)
    room = x.new_empty(w.shape[1] * step * grad.shape[-1] if needs[1] else 0)
    for n, rows, patches in _blocks(x, assign, window, step):
        g, gy = assign[n, :, :, rows], grad[n, :, rows].flatten(1)
        if needs[1]:
            grad_w.addmm_(gy, _weigh(patches, g, room).T)
        if needs[0] or needs[2]:
            z = (w.T @ gy).view(*window.kernel_size, kernels, *patches.shape[2:])  # d loss / d (assign · x)
            if needs[0]:
                first = rows.start * window.stride[0]
                views = window.views_of_padded(padded[n, :, first:], (z.shape[4], z.shape[5]))
                for p, (view, to_view) in enumerate(zip(views, z.flatten(0, 1), strict=True)):
                    for k in range(kernels):
                        view.addcmul_(to_view[k], g[k, p])
            if needs[2]:
                sums = z.mul_(patches.unsqueeze(2)).sum(3).flatten(0, 1)  # (taps, K, h, w)
                grad_assign[n, :, :, rows] = sums.transpose(0, 1)
    grad_x = padded[..., top : top + x.shape[2], left : left + x.shape[3]]
    grad_weight = grad_w.view(-1, window.taps, kernels, channels).permute(2, 0, 3, 1).reshape_as(weight)
    a, b, c = (t if need else None for t, need in zip((grad_x, grad_weight, grad_assign), needs, strict=True))
    return a, b, c


def _rows(x: Tensor, assign: Tensor, nbytes: int) -> int:
    """Tell how many output rows of weighted patches fit into so many bytes, at least one."""
    kernels, taps, height, width = assign.shape[1:]
    row_bytes = x.element_size() * kernels * taps * x.shape[1] * width
    return min(max(1, nbytes // max(row_bytes, 1)), height)


def _blocks(x: Tensor, assign: Tensor, window: Window, step: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield samples, output rows and what their taps read, a view (kh, kw, C, rows, Wout) of the padded sample."""
    height, width = assign.shape[-2:]
    for n in range(x.shape[0]):
        padded = F.pad(x[n], window.padding)
        (sh, sw), (dh, dw) = window.stride, window.dilation
        channel, row, column = padded.stride()
        strides = (dh * row, dw * column, channel, sh * row, sw * column)
        for first in range(0, height, step):
            rows = slice(first, min(first + step, height))
            shape = (*window.kernel_size, x.shape[1], rows.stop - first, width)
            yield n, rows, padded.as_strided(shape, strides, padded.storage_offset() + first * sh * row)


def _weigh(patches: Tensor, g: Tensor, room: Tensor) -> Tensor:
    """Weigh patches (kh, kw, C, h, w) by g (K, taps, h, w), as a matrix (taps·K·C, h·w) that lies in ``room``."""
    g = torch.unflatten(g, 1, patches.shape[:2]).permute(1, 2, 0, 3, 4)
    shape = (*g.shape[:3], *patches.shape[2:])
    weighted = room[: prod(shape)].view(shape)
    torch.mul(patches.unsqueeze(2), g.unsqueeze(3), out=weighted)
    return weighted.flatten(4).flatten(0, 3)


def _matrix(weight: Tensor, kernels: int) -> Tensor:
    """Lay weights (K·O, C, kh, kw) out as a matrix (O, taps·K·C)."""
    return torch.unflatten(weight.flatten(2), 0, (kernels, -1)).permute(1, 3, 0, 2).flatten(1)
