"""``malleable::depth_conv2d`` as a PyTorch operator: kernel, shapes, gradient and cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from malleable.ops.checks import check_depth_conv, check_depth_conv_grad, check_devices, check_dtypes
from malleable.ops.engines import choose
from malleable.ops.layout import output_format


def _new_output(x: Tensor, weight: Tensor, assign: Tensor) -> Tensor:
    shape = (x.shape[0], weight.shape[0] // assign.shape[1], *assign.shape[-2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=output_format(x, weight))


@torch.library.custom_op("malleable::depth_conv2d", mutates_args=())
def operator(
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    engine: str,
) -> Tensor:
    window = check_depth_conv(x, weight, assign, bias, stride, padding, dilation, groups)
    with torch.autocast(x.device.type, enabled=False):
        y = choose(engine, x, weight, assign, window, groups).forward(x, weight, assign, window, groups)
    if bias is not None:
        y += bias.view(-1, 1, 1)
    return y.contiguous(memory_format=output_format(x, weight))


@operator.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    engine: str,
) -> Tensor:
    check_devices(x, weight=weight, assign=assign, bias=bias)
    check_dtypes(x, weight=weight, assign=assign, bias=bias)
    return _new_output(x, weight, assign)


@torch.library.custom_op("malleable::depth_conv2d_backward", mutates_args=())
def operator_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    engine: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and assign; an empty tensor stands for one that is not needed."""
    window = check_depth_conv(x, weight, assign, None, stride, padding, dilation, groups)
    check_depth_conv_grad(grad, x, weight, assign, needs)
    run = choose(engine, x, weight, assign, window, groups)
    wanted = (needs[0], needs[1], needs[2])
    with torch.autocast(x.device.type, enabled=False):
        gradients = run.backward(grad, x, weight, assign, window, groups, wanted)
    a, b, c = (
        t.new_empty(0) if g is None else g if g.stride() == t.stride() else torch.empty_like(t).copy_(g)
        for g, t in zip(gradients, (x, weight, assign), strict=True)
    )
    return a, b, c


def _new_gradients(x: Tensor, weight: Tensor, assign: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = (
        torch.empty_like(t) if need else t.new_empty(0) for t, need in zip((x, weight, assign), needs, strict=True)
    )
    return a, b, c


@operator_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    engine: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    check_devices(x, weight=weight, assign=assign, grad=grad)
    check_dtypes(x, weight=weight, assign=assign, grad=grad)
    return _new_gradients(x, weight, assign, needs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, assign, _, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, assign)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, assign = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    gradients: list[Tensor | None] = [None] * 3
    if any(needs):
        computed = operator_backward(grad, x, weight, assign, *ctx.settings, needs)
        gradients = [g if need else None for g, need in zip(computed, needs, strict=True)]
    grad_bias = grad.sum((0, 2, 3)) if ctx.needs_input_grad[3] else None
    return (*gradients, grad_bias, *[None] * len(ctx.settings))


operator.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.malleable.depth_conv2d)
def _(x: Any, weight: Any, assign: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Two per multiply-add, as for a convolution: the products of every kernel, tap, channel and output pixel."""
    products = 2 * x[0]
    for n in (*weight, *assign[-2:]):
        products *= n
    return int(products)


@register_flop_formula(torch.ops.malleable.depth_conv2d_backward)
def _(grad: Any, x: Any, weight: Any, assign: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """One pass of products for x and assign together, one for the weights."""
    needs = args[-1]
    products = 2 * x[0] * ((needs[0] or needs[2]) + needs[1])
    for n in (*weight, *assign[-2:]):
        products *= n
    return int(products)
