"""The reference engine computes Eq. 8 in plain PyTorch, one tap at a time.

K and G count kernels and groups, c and o the channels in and out of one group. Sums run in at least float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from malleable.ops.window import Window

name = "plain"

Needs = tuple[bool, bool, bool]  # whether x, weight and assign need a gradient
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, weight and assign


def can_run(x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> str | None:
    """Return None: this engine runs everything, everywhere."""
    return None


def forward(
    x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, center: Tensor | None = None
) -> Tensor:
    """Compute y(i) = Σ_k Σ_p assign_k(i, p) · w_k(p) · x(i + p), (N, O, Hout, Wout).

    x is (N, C, H, W), weight (K·O, C / groups, kh, kw) and assign (N, K, taps, Hout, Wout). ``center`` (K,) may say
    what the center tap's assign is if that is the same at all pixels: its kernels then act as one.
    """
    w = _split(weight, assign.shape[1], groups)  # (K, G, o, c, taps)
    kernels = w.permute(4, 1, 2, 0, 3).flatten(3).flatten(1, 2)[..., None, None]  # (taps, O, K·c, 1, 1)
    depthwise = groups > 1 and w.shape[2] == w.shape[3] == 1
    y: Tensor | None = None
    accumulator = torch.promote_types(x.dtype, torch.float32)
    taps = zip(window.views(x), kernels.unbind(), torch.split(assign, 1, dim=2), strict=True)
    for p, (patch, kernel, g) in enumerate(taps):  # g is (N, K, 1, Hout, Wout)
        if center is not None and p == window.center:
            one = (w[..., p] * center.view(-1, 1, 1, 1)).sum(0).flatten(0, 1)  # (O, c)
            term = F.conv2d(patch, one[..., None, None], groups=groups)
        elif depthwise:
            term = patch * F.conv2d(g.squeeze(2), kernel)
        else:
            term = F.conv2d(_weigh(patch, g, groups), kernel, groups=groups)
        term = term if term.dtype == accumulator else term.to(accumulator)  # a graph would keep what changes nothing
        y = term if y is None else y + term
    assert y is not None
    return y.to(x.dtype)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, needs: Needs
) -> Gradients:
    """Compute the gradients of x, weight and assign from ``grad`` (N, O, Hout, Wout), None where not needed.

    Patches are made again tap by tap, so nothing larger than one tap's is ever kept.
    """
    dtype, accumulator = x.dtype, torch.promote_types(x.dtype, torch.float32)
    grad, x, weight, assign = (t.to(accumulator) for t in (grad, x, weight, assign))
    w = _split(weight, assign.shape[1], groups)
    gy = torch.unflatten(grad, 1, (groups, -1))  # (N, G, o, Hout, Wout)
    left, right, top, bottom = window.padding
    padded = x.new_zeros(*x.shape[:2], x.shape[2] + top + bottom, x.shape[3] + left + right)
    grad_views = window.views_of_padded(padded, window.output_size(x.shape[-2:]))
    grad_w, grad_assign = torch.zeros_like(w), torch.zeros_like(assign)
    for p, (patch, grad_view) in enumerate(zip(window.views(x), grad_views, strict=True)):
        g = assign[:, :, p]
        if needs[0] or needs[2]:
            to_weighted = torch.einsum("ngohw,kgoc->nkgchw", gy, w[..., p])  # d loss / d (assign · x)
            if needs[0]:
                grad_view += (to_weighted * g[:, :, None, None]).sum(1).flatten(1, 2)
            if needs[2]:
                grad_assign[:, :, p] = (to_weighted * torch.unflatten(patch, 1, (groups, -1))[:, None]).sum((2, 3))
        if needs[1]:
            weighted = torch.unflatten(_weigh(patch, g.unsqueeze(2), groups), 1, (groups, assign.shape[1], -1))
            grad_w[..., p] = torch.einsum("ngohw,ngkchw->kgoc", gy, weighted)
    grad_x = padded[..., top : top + x.shape[2], left : left + x.shape[3]]
    gradients = (grad_x, grad_w.reshape_as(weight), grad_assign)
    a, b, c = (g.to(dtype) if need else None for g, need in zip(gradients, needs, strict=True))
    return a, b, c


def output_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Tell the layout nn.Conv2d gives its output: channels-last if its input or weights are that and nothing else."""
    for t in (x, weight):
        if t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous():
            return torch.channels_last
    return torch.contiguous_format


def _split(weight: Tensor, kernels: int, groups: int) -> Tensor:
    """View (K·O, C / G, kh, kw) as (K, G, o, c, taps)."""
    return torch.unflatten(weight.flatten(2), 0, (kernels, groups, -1))


def _weigh(patch: Tensor, g: Tensor, groups: int) -> Tensor:
    """Compute g_k(i, i + p) · x(i + p) of one tap: (N, C, ...) and (N, K, 1, ...) give (N, G·K·c, ...)."""
    if groups == 1:
        return (patch.unsqueeze(1) * g).flatten(1, 2)
    return (torch.unflatten(patch, 1, (groups, 1, -1)) * g.unsqueeze(1)).flatten(1, 3)
