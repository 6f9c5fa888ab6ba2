"""What the operators' arguments must be. Kernels trust it: a wrong shape would have them read outside of memory.

Devices and dtypes are also checked of tensors without data; sizes are not, a compiler would have to prove each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from malleable.ops.window import Window, pair


def check_depth_conv(
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Window:
    """Refuse what ``malleable::depth_conv2d`` cannot compute; the window that its lists describe."""
    if weight.ndim != 4:
        raise ValueError(f"weight must have shape (K·O, C / groups, kh, kw), got {tuple(weight.shape)}")
    if len(padding) != 4 or min(padding) < 0:
        raise ValueError(f"padding must be four integers ≥ 0 (left, right, top, bottom), got {list(padding)}")
    left, right, top, bottom = padding
    window = Window(
        pair("kernel_size (dimensions 2 and 3 of weight)", weight.shape[2:], minimum=1),
        pair("stride", stride, minimum=1),
        (left, right, top, bottom),
        pair("dilation", dilation, minimum=1),
    )
    check_features(x, weight, window, groups)
    check_assign(x, weight, assign, bias, window, groups)
    check_dtypes(x, weight=weight, assign=assign, bias=bias)
    return window


def check_features(x: Tensor, weight: Tensor, window: Window, groups: int) -> None:
    """Refuse features that ``weight`` cannot be applied to."""
    if x.ndim != 4:
        raise ValueError(f"x must have shape (N, C, H, W), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}; convert integer images first, for example x.float()")
    check_devices(x, weight=weight)
    if groups < 1 or x.shape[1] < 1:
        raise ValueError(f"groups and the channels of x must be at least 1, got {groups} and {x.shape[1]}")
    if x.shape[1] != weight.shape[1] * groups:
        raise ValueError(f"x must have {weight.shape[1] * groups} channels, got {x.shape[1]} in {tuple(x.shape)}")
    if min(window.output_size(x.shape[-2:])) < 1:
        raise ValueError(
            f"x of {x.shape[2]}×{x.shape[3]} is smaller than kernel_size {window.kernel_size} with dilation "
            f"{window.dilation}: add padding"
        )


def check_assign(x: Tensor, weight: Tensor, assign: Tensor, bias: Tensor | None, window: Window, groups: int) -> None:
    """Refuse an ``assign`` or ``bias`` that does not belong to ``x`` and ``weight``."""
    if assign.ndim != 5:
        raise ValueError(f"assign must have shape (N, K, taps, Hout, Wout), got {tuple(assign.shape)}")
    kernels = assign.shape[1]
    if kernels < 1 or weight.shape[0] % (kernels * groups):
        raise ValueError(
            f"weight has {weight.shape[0]} rows, which {kernels} kernels (dimension 1 of assign) of {groups} groups "
            "cannot share"
        )
    check_devices(x, assign=assign, bias=bias)
    if bias is not None:
        _check_shape("bias", bias, "(O,)", (weight.shape[0] // kernels,))
    expected = (x.shape[0], kernels, window.taps, *window.output_size(x.shape[-2:]))
    _check_shape("assign", assign, "(N, K, taps, Hout, Wout)", expected)


def check_depth_conv_grad(grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, needs: Sequence[bool]) -> None:
    """Refuse a gradient that is not of the output, whose arguments are as :func:`check_depth_conv` wants them."""
    check_devices(x, grad=grad)
    check_dtypes(x, grad=grad)
    expected = (x.shape[0], weight.shape[0] // assign.shape[1], *assign.shape[-2:])
    _check_shape("grad", grad, "(N, O, Hout, Wout)", expected)
    if len(needs) != 3:
        raise ValueError(f"needs must be three booleans, for x, weight and assign, got {list(needs)}")


def check_scaled_assign(
    d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor, most_kernels: int, grad: Tensor | None = None
) -> None:
    """Refuse what ``malleable::scaled_assign`` cannot compute, and a gradient that is not of its output."""
    check_single_on_cpu(d=d, centers=centers, temperature=temperature, scale=scale, grad=grad)
    if d.ndim != 4:
        raise ValueError(f"d must have shape (N, taps, Hout, Wout), got {tuple(d.shape)}")
    if scale.ndim != 1 or not 1 <= scale.shape[0] <= most_kernels:
        raise ValueError(f"scale must have shape (K,), K from 1 to {most_kernels}, got {tuple(scale.shape)}")
    _check_shape("centers", centers, "(K + 2,)", (scale.shape[0] + 2,))
    _check_shape("temperature", temperature, "of a scalar", ())
    if grad is not None:
        _check_shape("grad", grad, "(N, K, taps, Hout, Wout)", (d.shape[0], scale.shape[0], *d.shape[1:]))


def check_single_on_cpu(**tensors: Tensor | None) -> None:
    """Refuse tensors that are not float32 on the CPU."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {tensor.dtype}")


def check_devices(x: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors on another device than x."""
    device = x.device
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"x is on {device} but {name} on {tensor.device}; move both to one device")


def check_dtypes(x: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors of another dtype than x."""
    dtype = x.dtype
    for name, tensor in others.items():
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(f"x is {dtype} but {name} is {tensor.dtype}; cast one, or run under torch.autocast")


def _check_shape(name: str, tensor: Tensor, meaning: str, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ValueError(f"{name} must have shape {meaning} = {expected}, got {tuple(tensor.shape)}")
