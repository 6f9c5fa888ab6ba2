"""The paper's equations as nested loops over pixels, taps and kernels, in float64. Imports nothing from the library.

Everything is written with scalar tensors, so that autograd gives the oracle's own gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Assign = Callable[[Tensor, Tensor], list[Tensor]]  # (relative d, difference in metres) -> g_1 … g_K


def malleable(centers: Tensor, temperature: Tensor) -> Assign:
    """Eqs. 5 to 7."""

    def assign(d: Tensor, metres: Tensor) -> list[Tensor]:
        last = len(centers) - 1
        h = [-((d - centers[k]) ** 2) / temperature for k in range(len(centers))]
        h[0] = -torch.sign(d - centers[0]) * (d - centers[0]) ** 2 / temperature
        h[last] = torch.sign(d - centers[last]) * (d - centers[last]) ** 2 / temperature
        highest = max(value.item() for value in h)
        e = [torch.exp(value - highest) for value in h]
        return [e[k] / sum(e) for k in range(1, last)]

    return assign


def hard(kernels: int) -> Assign:
    """Eq. 11."""

    def assign(d: Tensor, metres: Tensor) -> list[Tensor]:
        return [
            torch.ones_like(d) if k - 1 - kernels / 2 <= d < k - kernels / 2 else torch.zeros_like(d)
            for k in range(1, kernels + 1)
        ]

    return assign


def depth_aware(alpha: float) -> Assign:
    """Eq. 10."""
    return lambda d, metres: [torch.exp(-alpha * torch.abs(metres))]


def scales(b: Tensor) -> list[Tensor]:
    """Eq. 9."""
    return [torch.exp(b[k]) / sum(torch.exp(b[m]) for m in range(len(b))) for k in range(len(b))]


def relative_depth(center: Tensor, neighbour: Tensor, focal: Tensor, rate: float, dilation: float) -> Tensor:
    """Eq. 1."""
    return (center - neighbour) / (rate * dilation * center / focal)


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    depth: Tensor,
    focal: Tensor,
    rate: int,
    assign: Assign,
    scale: list[Tensor],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    invalid: str = "same",
) -> Tensor:
    """Eq. 8: y(i) = Σ_k s_k Σ_p g_k(i, i+p) w_k(p) x(i+p), with depth (N, 1, H, W) at ``rate`` times x's resolution."""
    kernels = len(scale)
    batch, in_channels, height, width = x.shape
    out_channels = weight.shape[0] // kernels
    kh, kw = weight.shape[2:]
    o, c = out_channels // groups, in_channels // groups
    zero = torch.zeros((), dtype=torch.float64)
    y = {}

    def depth_at(n: int, row: int, column: int) -> Tensor | None:
        if not (0 <= row < height and 0 <= column < width):
            return None
        value = depth[n, 0, row * rate, column * rate]
        return value if math.isfinite(value.item()) and value.item() > 0 else None

    rows = (height + 2 * padding[0] - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    columns = (width + 2 * padding[1] - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    for n in range(batch):
        for i in range(rows):
            for j in range(columns):
                top, left = i * stride[0] - padding[0], j * stride[1] - padding[1]
                center = depth_at(n, top + kh // 2 * dilation[0], left + kw // 2 * dilation[1])
                total = torch.zeros(out_channels, dtype=torch.float64)
                for p in range(kh):
                    for q in range(kw):
                        row, column = top + p * dilation[0], left + q * dilation[1]
                        if not (0 <= row < height and 0 <= column < width):
                            continue
                        neighbour = depth_at(n, row, column)
                        if center is not None and neighbour is not None:
                            d = relative_depth(center, neighbour, focal[n], rate, sum(dilation) / 2)
                            g = assign(d, center - neighbour)
                        elif invalid == "same":
                            g = assign(zero, zero)
                        else:
                            g = [zero + (1 / (kernels + 2) if invalid == "uniform" else 0)] * kernels
                        for k in range(kernels):
                            w = weight[k * out_channels : (k + 1) * out_channels, :, p, q]
                            products = [
                                w[m * o : (m + 1) * o] @ x[n, m * c : (m + 1) * c, row, column] for m in range(groups)
                            ]
                            total = total + scale[k] * g[k] * torch.cat(products)
                y[n, i, j] = total if bias is None else total + bias
    if not y:
        return x.new_zeros(batch, out_channels, rows, columns)
    return torch.stack(list(y.values())).view(batch, rows, columns, out_channels).permute(0, 3, 1, 2)
