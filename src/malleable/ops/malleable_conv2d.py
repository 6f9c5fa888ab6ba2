"""The assignment of a malleable layer and its convolution in one call: on a small map a step costs more than it does.

Autograd sees one node. What depends on shapes alone is found once for all calls that are alike, as layers make them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from malleable.ops.depth_conv2d import convolve, engine_for, without_autocast
from malleable.ops.depth_conv2d import gradients as conv_gradients
from malleable.ops.direct import is_batched, is_direct, is_recorded, pointer
from malleable.ops.engines import native, wish
from malleable.ops.engines.native.build import library
from malleable.ops.engines.plain import output_format
from malleable.ops.scaled_assign import fits, scaled_assign, temperature_of
from malleable.ops.scaled_assign import gradients as assign_gradients
from malleable.ops.window import Window

_Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor]  # as malleable_conv2d has them

_CPU = torch.device("cpu")
_MOST_CALLS = 4096


class _Plan(NamedTuple):
    """How to run calls that are alike."""

    run: Callable[..., int]
    assign: tuple[torch.Size, tuple[int, ...]]  # shape and strides
    y: tuple[torch.Size, tuple[int, ...]]
    window: Window
    groups: int


_plans: dict[Hashable, _Plan | None] = {}


def malleable_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    d: Tensor,
    centers: Tensor,
    raw_temperature: Tensor,
    rebalance: Tensor,
    gain: Tensor,
    bounds: tuple[float, float],
    window: Window,
    groups: int,
) -> Tensor | None:
    """Convolve x by the assignment of d that a layer's parameters make, within ``bounds``, bend and coldest.

    None where that takes two calls.
    """
    tensors = (x, weight, bias, d, centers, raw_temperature, rebalance, gain)
    if not is_direct(*tensors) or torch.is_autocast_enabled("cpu"):
        return None
    wished = wish()
    if wished not in ("auto", "native"):
        return None
    settings = (wished, library(), torch.get_num_threads(), window, groups)
    call = (*settings, x.stride(), weight.stride(), *[t if t is None else (t.shape, t.dtype) for t in tensors])
    try:
        plan = _plans[call]
    except KeyError:
        if len(_plans) >= _MOST_CALLS:
            _plans.clear()
        plan = _plans[call] = _plan(x, weight, bias, d, (centers, raw_temperature, rebalance, gain), window, groups)
    if plan is None:
        return None
    if is_recorded(*tensors):
        return cast(Tensor, _RecordedAtOnce.apply(*tensors, bounds, plan))
    return _forward(None, tensors, bounds, plan)


def _plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, d: Tensor, field: tuple[Tensor, ...], window: Window, groups: int
) -> _Plan | None:
    """Check a call; None where it cannot be run at once."""
    kernels = field[2].shape[0]
    if x.dtype != torch.float32 or not fits(d, *field):
        return None
    assign = d.new_empty((d.shape[0], kernels, *d.shape[1:]))
    if engine_for(x, weight, assign, bias, window, groups) is not native:
        return None
    shape = (x.shape[0], weight.shape[0] // kernels, *d.shape[-2:])
    y = torch.empty(shape, dtype=x.dtype, device=_CPU, memory_format=output_format(x, weight))
    if not y.numel():
        return None
    run = native.malleable(x, y, kernels, window, groups, torch.get_num_threads())
    return _Plan(run, (assign.shape, assign.stride()), (y.shape, y.stride()), window, groups)


def _forward(assign: Tensor | None, tensors: _Tensors, bounds: tuple[float, float], plan: _Plan) -> Tensor:
    """Run a plan, and write the assignment to ``assign`` if it is wanted."""
    x, weight, bias, d, centers, raw_temperature, rebalance, gain = tensors
    y = torch.empty_strided(*plan.y, dtype=torch.float32, device=_CPU)
    weight, d, centers, rebalance = weight.contiguous(), d.contiguous(), centers.contiguous(), rebalance.contiguous()
    bias = bias if bias is None else bias.contiguous()
    failed = plan.run(
        pointer(x), pointer(weight), bias if bias is None else pointer(bias), pointer(d), pointer(centers),
        pointer(raw_temperature), pointer(rebalance), pointer(gain), *bounds,
        assign if assign is None else pointer(assign), pointer(y)
    )  # fmt: skip
    native.check(failed)
    return y


class _RecordedAtOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, bounds, plan = arguments
        assign = torch.empty_strided(*plan.assign, dtype=torch.float32, device=_CPU)
        x, weight, _, *others = tensors
        ctx.save_for_backward(assign, x, weight, *others)
        ctx.settings = *bounds, plan.window, plan.groups
        return _forward(assign, cast(_Tensors, tensors), bounds, plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assign, *inputs = ctx.saved_tensors  # once: activation checkpointing gives each of them away once
        of_x, of_weight, of_bias, of_d, *of_field = ctx.needs_input_grad[:8]
        grad_bias = grad.sum((0, 2, 3)) if of_bias else None
        if is_recorded(grad, *inputs) or is_batched(grad) or not is_direct(grad, *inputs):
            grad_x, grad_weight, *others = _gradients_of_two_steps(grad, inputs, *ctx.settings)
            return grad_x, grad_weight, grad_bias, *others, None, None
        bend, coldest, window, groups = ctx.settings
        x, weight, *parameters = inputs
        needs = (of_x, of_weight, of_d or any(of_field))
        grad_x, grad_weight, grad_assign = conv_gradients(grad, (x, weight, assign), window, groups, "auto", needs)
        others = [None] * 5
        if grad_assign is not None:
            others = [*_gradients_of_parameters(grad_assign, parameters, bend, coldest, of_d)]
        return grad_x, grad_weight, grad_bias, *others, None, None


def _gradients_of_parameters(
    grad: Tensor, inputs: list[Tensor], bend: float, coldest: float, of_d: bool
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of d, if it needs one, and of a layer's parameters from that of the assignment."""
    d, centers, raw, rebalance, gain = inputs
    scales, temperature = rebalance.softmax(0), temperature_of(raw, bend, coldest)
    grad_d, of_centers, of_temperature, of_scale = assign_gradients(grad, d, centers, temperature, scales * gain, of_d)
    slope = torch.where(raw < bend, (bend / (2 * bend - raw)) ** 2, 1.0)
    shares = of_scale * scales
    of_rebalance = gain * (shares - scales * shares.sum())
    return grad_d, of_centers, of_temperature * slope, of_rebalance, shares.sum()


def _gradients_of_two_steps(
    grad: Tensor, inputs: list[Tensor], bend: float, coldest: float, window: Window, groups: int
) -> list[Tensor | None]:
    """Compute gradients that can be differentiated again, or many at a time, from the two steps, of which both can."""
    again = torch.is_grad_enabled()
    if not any(t.requires_grad for t in inputs):  # the bias alone is trained
        return [None] * len(inputs)
    with torch.enable_grad(), without_autocast("cpu"):
        inputs = [t.view_as(t) for t in inputs]
        x, weight, d, centers, raw, rebalance, gain = inputs
        assign = scaled_assign(d, centers, temperature_of(raw, bend, coldest), rebalance.softmax(0) * gain)
        y = convolve(x, weight, assign, None, window, groups)
        found = iter(torch.autograd.grad(y, [t for t in inputs if t.requires_grad], grad, create_graph=again))
    return [next(found) if t.requires_grad else None for t in inputs]
