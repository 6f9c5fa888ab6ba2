"""What the operator's tensors must be. Kernels trust it: a wrong shape would have them read outside of memory."""

from __future__ import annotations

from torch import Tensor

from malleable.window import Window


def check_features(x: Tensor, weight: Tensor, window: Window, groups: int) -> None:
    """Refuse features that ``weight`` cannot be applied to."""
    if x.ndim != 4:
        raise ValueError(f"x must have shape (N, C, H, W), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}; convert integer images first, for example x.float()")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device} but weight on {weight.device}; move both to one device")
    if x.shape[1] != weight.shape[1] * groups:
        raise ValueError(f"x must have {weight.shape[1] * groups} channels, got {x.shape[1]} in {tuple(x.shape)}")
    if min(window.output_size(x.shape[-2:])) < 1:
        raise ValueError(
            f"x of {x.shape[2]}×{x.shape[3]} is smaller than kernel_size {window.kernel_size} with dilation "
            f"{window.dilation}: add padding"
        )


def check_assign(x: Tensor, weight: Tensor, assign: Tensor, bias: Tensor | None, window: Window, groups: int) -> None:
    """Refuse an ``assign`` or ``bias`` that does not belong to ``x`` and ``weight``."""
    kernels = assign.shape[1]
    if kernels < 1 or weight.shape[0] % (kernels * groups):
        raise ValueError(
            f"weight has {weight.shape[0]} rows, which {kernels} kernels (dimension 1 of assign) of {groups} groups "
            "cannot share"
        )
    if bias is not None and bias.shape != (weight.shape[0] // kernels,):
        raise ValueError(f"bias must have shape ({weight.shape[0] // kernels},), got {tuple(bias.shape)}")
    for name, tensor in (("assign", assign), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x on {x.device}; move both to one device")
    expected = (x.shape[0], kernels, window.taps, *window.output_size(x.shape[-2:]))
    if tuple(assign.shape) != expected:
        raise ValueError(f"assign must have shape (N, K, taps, Hout, Wout) = {expected}, got {tuple(assign.shape)}")
