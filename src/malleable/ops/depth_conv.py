"""The operator as users call it: arguments checked and put in form, then one call."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from malleable.ops.checks import check_assign, check_dtypes, check_features
from malleable.ops.engines import check_engine, plain
from malleable.ops.operator import operator
from malleable.ops.window import Pair, Window


def depth_conv2d(
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    engine: str = "auto",
) -> Tensor:
    """Convolution with K kernels whose taps are weighted pixel by pixel (paper, Eq. 8).

    ``y(i) = Σ_k Σ_p assign_k(i, p) · w_k(p) · x(i + p) + bias``, differentiable in every tensor.

    Args:
        x: features (N, C, H, W).
        weight: (K·O, C / groups, kh, kw), kernel after kernel.
        assign: what kernel k makes of tap p, (N, K, kh·kw, Hout, Wout), with every scale folded in. Cast to x's dtype.
        bias: (O,)
        stride, padding, dilation, groups: as for ``torch.nn.functional.conv2d``.
        engine: ``"auto"``, or the name of one engine.

    Returns:
        (N, O, Hout, Wout), as ``conv2d`` of the same arguments.
    """
    if x.ndim != 4 or weight.ndim != 4 or assign.ndim != 5:
        raise ValueError(
            "x must be (N, C, H, W), weight (K·O, C / groups, kh, kw) and assign (N, K, taps, Hout, Wout); "
            f"got {tuple(x.shape)}, {tuple(weight.shape)} and {tuple(assign.shape)}"
        )
    window = Window.of(tuple(weight.shape[-2:]), stride, padding, dilation)
    if not torch.compiler.is_compiling():  # symbolic sizes make a compiler prove each of these; the operator checks too
        check_features(x, weight, window, groups)
        check_assign(x, weight, assign, bias, window, groups)
    check_engine(engine)
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    check_dtypes(x, weight=weight, bias=bias)
    assign = assign.to(x.dtype)
    if not torch.compiler.is_exporting():
        settings = (list(window.stride), list(window.padding), list(window.dilation), groups, engine)
        return cast(Tensor, operator(x, weight, assign, bias, *settings))
    y = plain.forward(x, weight, assign, window, groups)
    return y if bias is None else y + bias.view(-1, 1, 1)
