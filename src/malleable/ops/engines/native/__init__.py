"""The fast CPU engine calls C++ from ``csrc/`` with bare pointers."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from malleable.ops.engines.native.build import library
from malleable.ops.engines.plain import Gradients, Needs, output_format
from malleable.ops.window import Window

name = "native"

_SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_PANEL = 64  # channels are packed in panels of at most this many
_CHANNELS_PER_THREAD = 12  # fewer are not worth a thread of their own
_WORKSPACE = 32 * 2**20  # bytes a thread may use
_LARGEST = 2**30  # sums of two of these still fit the C++ integers
_GROUP = 32  # channels; narrower groups are run several at a time, zeros between them


class Problem(ctypes.Structure):
    """Holds the sizes and strides of one call, as ``csrc/common.h`` declares them."""

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
    left, right, top, bottom = window.padding
    padded = (x.shape[2] + top + bottom, x.shape[3] + left + right)
    if max(*x.shape, *padded, *weight.shape, *window.stride, *window.dilation) >= _LARGEST:
        return f"it cannot count beyond {_LARGEST} in sizes, stride, padding or dilation"
    reach = [d * (k - 1) for d, k in zip(window.dilation, window.kernel_size, strict=True)]
    if groups == x.shape[1] and 4 * _PANEL * (reach[0] + 64) * (reach[1] + 64) > _WORKSPACE:
        return f"a depthwise kernel that reaches over {reach[0]}×{reach[1]} pixels would not fit its workspace"
    built = library()
    if isinstance(built, str):
        return built
    if not hasattr(built, f"dense_forward_{_SUFFIX[x.dtype]}"):
        return f"the compiler does not know {x.dtype}"
    return None


def forward(x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> Tensor:
    kernels = assign.shape[1]
    shape = (x.shape[0], weight.shape[0] // kernels, *assign.shape[-2:])
    y = torch.empty(shape, dtype=x.dtype, memory_format=output_format(x, weight))
    together = _groups_together(x, shape[1], groups)
    weight, groups = _join_groups(weight, kernels, groups, together), groups // together
    if y.numel():
        problem = _problem(x, y, x, assign, window, groups)
        packed = torch.empty(_floats(problem, problem.channels, problem.out_channels))
        _call("forward", problem, x, weight.contiguous(), assign.contiguous(), y, packed)
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, needs: Needs
) -> Gradients:
    kernels = assign.shape[1]
    together = _groups_together(x, grad.shape[1], groups)
    joined = _join_groups(weight, kernels, groups, together).contiguous()
    assign = assign.contiguous()
    grad_x = torch.zeros_like(x) if needs[0] else None
    grad_joined = torch.zeros_like(joined) if needs[1] else None
    grad_assign = torch.zeros_like(assign, dtype=torch.float32) if needs[2] else None
    if grad.numel():
        problem = _problem(x, grad, x if grad_x is None else grad_x, assign, window, groups // together)
        run = _depthwise_backward if _is_depthwise(problem) else _dense_backward
        run(problem, grad, x, joined, assign, (grad_x, grad_joined, grad_assign))
    return (
        grad_x,
        None if grad_joined is None else _part_groups(grad_joined, kernels, groups, together),
        None if grad_assign is None else grad_assign.to(x.dtype),
    )


def _dense_backward(
    problem: Problem, grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, gradients: Gradients
) -> None:
    grad_x, grad_weight, grad_assign = gradients
    if grad_x is not None or grad_assign is not None:
        packed = torch.empty(_floats(problem, problem.out_channels, problem.channels))
        _call("backward_data", problem, grad, x, weight, assign, grad_x, grad_assign, packed)
        del packed
    if grad_weight is not None:
        # Threads share out the channels; pixels too, each share with sums of its own, while those stay small.
        columns = max(1, min(problem.threads, problem.channels // problem.groups // _CHANNELS_PER_THREAD))
        part = _floats(problem, problem.channels, problem.out_channels)
        shares = max(1, min(problem.threads // columns, _WORKSPACE * problem.threads // (4 * part)))
        parts = torch.empty(shares * part)
        _call("backward_weight", problem, grad, x, assign, grad_weight, parts, shares)


def _depthwise_backward(
    problem: Problem, grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, gradients: Gradients
) -> None:
    grad_x, grad_weight, grad_assign = gradients
    packed = torch.empty(_floats(problem, problem.channels, problem.out_channels))
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
    if getattr(built, f"{path}_{kernel}_{_SUFFIX[first.dtype]}")(ctypes.byref(problem), *pointers):
        raise MemoryError("not enough memory for the workspace of the CPU engine")


def _problem(x: Tensor, y: Tensor, grad_x: Tensor, assign: Tensor, window: Window, groups: int) -> Problem:
    left, _, top, _ = window.padding
    sizes = (x.shape[0], x.shape[1], y.shape[1], assign.shape[1], groups, *x.shape[2:], *y.shape[2:])
    grid = (*window.kernel_size, *window.stride, *window.dilation, top, left)
    return Problem(*sizes, *grid, torch.get_num_threads(), x.stride(), y.stride(), grad_x.stride())


def _is_depthwise(problem: Problem) -> bool:
    return bool(problem.groups == problem.channels == problem.out_channels)


def _floats(problem: Problem, inputs: int, outputs: int) -> int:
    """Count the floats that the weights of one group take as kernels pack them, outputs padded to whole panels."""
    groups = 1 if _is_depthwise(problem) else problem.groups
    rows = 1 if _is_depthwise(problem) else inputs // groups
    padded = -(-outputs // groups // _PANEL) * _PANEL
    return int(problem.kernels * problem.kh * problem.kw * rows * padded)


def _groups_together(x: Tensor, out_channels: int, groups: int) -> int:
    """Tell how many groups to run as one: a divisor of their number that makes them wide enough for whole vectors."""
    if groups in (1, x.shape[1]) and groups in (1, out_channels):
        return 1
    width = x.shape[1] // groups
    return next((n for n in range(1, groups) if groups % n == 0 and n * width >= _GROUP), groups)


def _join_groups(weight: Tensor, kernels: int, groups: int, together: int) -> Tensor:
    """Widen (K·O, c, kh, kw) to (K·O, together·c, kh, kw): each group's block on the diagonal, zeros beside it."""
    if together == 1:
        return weight
    blocks = weight.view(kernels * groups // together, together, -1, *weight.shape[1:])
    joined = weight.new_zeros(*blocks.shape[:3], together, *weight.shape[1:])
    joined.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(1, -1))
    return joined.view(weight.shape[0], together * weight.shape[1], *weight.shape[2:])


def _part_groups(joined: Tensor, kernels: int, groups: int, together: int) -> Tensor:
    """Take the blocks that :func:`_join_groups` put on the diagonal out again."""
    if together == 1:
        return joined
    channels = joined.shape[1] // together
    blocks = joined.view(kernels * groups // together, together, -1, together, channels, *joined.shape[2:])
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1).reshape(joined.shape[0], channels, *joined.shape[2:])
