"""The fast CPU engine: C++ from ``csrc/``, called with bare pointers."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from malleable.ops.build import library
from malleable.window import Window

name = "native"

_SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_PANEL = 64  # channels are packed in panels of at most this many
_CHANNELS_PER_THREAD = 12  # fewer are not worth a thread of their own
_WORKSPACE = 32 * 2**20  # bytes a thread may use for partial sums of the weights' gradient


class Problem(ctypes.Structure):
    """As in ``csrc/common.h``."""

    _fields_ = [
        *((field, ctypes.c_int32) for field in ("batch", "channels", "out_channels", "kernels", "groups")),
        *((field, ctypes.c_int32) for field in ("height", "width", "out_height", "out_width")),
        *((field, ctypes.c_int32) for field in ("kh", "kw", "sh", "sw", "dh", "dw", "top", "left", "threads")),
        *((field, ctypes.c_int64 * 4) for field in ("x_stride", "y_stride", "grad_x_stride")),
    ]


def can_run(x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> str | None:
    if x.device.type != "cpu":
        return f"it runs on the CPU, x is on {x.device}"
    if x.dtype not in _SUFFIX:
        return f"it takes float32, bfloat16 and float16, x is {x.dtype}"
    built = library()
    if isinstance(built, str):
        return built
    if not hasattr(built, f"dense_forward_{_SUFFIX[x.dtype]}"):
        return f"the compiler does not know {x.dtype}"
    return None


def forward(x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> Tensor:
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    shape = (x.shape[0], weight.shape[0] // assign.shape[1], *assign.shape[-2:])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    y = torch.empty(shape, dtype=x.dtype, memory_format=layout)
    if y.numel():
        problem = _problem(x, y, x, assign, window, groups)
        packed = _room(problem, problem.channels, problem.out_channels)
        _call("forward", problem, x, weight.contiguous(), assign.contiguous(), y, packed)
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    weight, assign = weight.contiguous(), assign.contiguous()
    grad_x = torch.empty_like(x) if needs[0] else None
    grad_weight = torch.zeros_like(weight) if needs[1] else None
    grad_assign = torch.zeros_like(assign) if needs[2] else None
    if not grad.numel():
        return grad_x, grad_weight, grad_assign
    problem = _problem(x, grad, x if grad_x is None else grad_x, assign, window, groups)
    tensors = (grad, x, weight, assign)
    if _is_depthwise(problem):
        _depthwise_backward(problem, *tensors, grad_x, grad_weight, grad_assign)
    else:
        _dense_backward(problem, *tensors, grad_x, grad_weight, grad_assign)
    return grad_x, grad_weight, grad_assign


def _dense_backward(
    problem: Problem,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_assign: Tensor | None,
) -> None:
    if grad_x is not None or grad_assign is not None:
        packed = _room(problem, problem.out_channels, problem.channels)
        _call("backward_data", problem, grad, x, weight, assign, grad_x, grad_assign, packed)
    if grad_weight is not None:
        # Threads share out the channels; pixels too, each share with sums of its own, while those stay small.
        slices = max(1, min(problem.threads, problem.channels // problem.groups // _CHANNELS_PER_THREAD))
        part = _room(problem, problem.channels, problem.out_channels)
        shares = max(1, min(problem.threads // slices, _WORKSPACE * problem.threads // (4 * part.numel())))
        parts = part.new_empty(shares * part.numel())
        _call("backward_weight", problem, grad, x, assign, grad_weight, parts, shares)


def _depthwise_backward(
    problem: Problem,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_assign: Tensor | None,
) -> None:
    packed = _room(problem, problem.channels, problem.out_channels)
    if grad_x is not None:
        _call("backward_input", problem, grad, weight, assign, grad_x, packed)
    if grad_weight is not None or grad_assign is not None:
        parts = packed.new_empty(problem.threads * packed.numel())
        _call("backward_rest", problem, grad, x, weight, assign, grad_weight, grad_assign, packed, parts)


def _call(kernel: str, problem: Problem, first: Tensor, *rest: Tensor | int | None) -> None:
    built = library()
    assert not isinstance(built, str), built
    path = "depthwise" if _is_depthwise(problem) else "dense"
    pointers = (ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in (first, *rest))
    getattr(built, f"{path}_{kernel}_{_SUFFIX[first.dtype]}")(ctypes.byref(problem), *pointers)


def _problem(x: Tensor, y: Tensor, grad_x: Tensor, assign: Tensor, window: Window, groups: int) -> Problem:
    left, _, top, _ = window.padding
    sizes = (x.shape[0], x.shape[1], y.shape[1], assign.shape[1], groups, *x.shape[2:], *y.shape[2:])
    grid = (*window.kernel_size, *window.stride, *window.dilation, top, left)
    return Problem(*sizes, *grid, torch.get_num_threads(), x.stride(), y.stride(), grad_x.stride())


def _is_depthwise(problem: Problem) -> bool:
    return bool(problem.groups == problem.channels == problem.out_channels)


def _room(problem: Problem, inputs: int, outputs: int) -> Tensor:
    """Floats for the weights of one group as the kernels pack them, outputs padded to whole panels."""
    groups = 1 if _is_depthwise(problem) else problem.groups
    rows = 1 if _is_depthwise(problem) else inputs // groups
    return torch.empty(problem.kernels * problem.kh * problem.kw * rows * _round_up(outputs // groups, _PANEL))


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
