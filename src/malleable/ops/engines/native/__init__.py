"""The fast CPU engine calls C++ from ``csrc/`` with bare pointers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from malleable.ops.direct import pointer
from malleable.ops.engines.native.build import library
from malleable.ops.engines.plain import Gradients, Needs, output_format
from malleable.ops.window import Window

name = "native"

_PATHS = ("dense", "depthwise", "grouped")  # as csrc/malleable.cpp numbers them
_SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_WORKSPACE = 32 * 2**20  # bytes a thread may use
_LARGEST = 2**30  # sums of two of these still fit the C++ integers
_NARROW = 32  # channels; groups with fewer do not fill vectors with channels but with pixels
_FEW = 16  # channels; the same for maps with fewer, such as images


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
    narrow = _path(x.shape[1], weight.shape[0] // assign.shape[1], groups) != "dense"
    if narrow and 4 * _NARROW * (reach[0] + 1) * (reach[1] + padded[1]) > _WORKSPACE:
        return f"a kernel of narrow groups that reaches over {reach[0]}×{reach[1]} pixels would not fit its workspace"
    built = library()
    if isinstance(built, str):
        return built
    if not hasattr(built, f"dense_forward_{_SUFFIX[x.dtype]}"):
        return f"the compiler does not know {x.dtype}"
    return None


def forward(x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> Tensor:
    kernels, layout = assign.shape[1], output_format(x, weight)
    shape = (x.shape[0], weight.shape[0] // kernels, *assign.shape[-2:])
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    if y.numel():
        weight, assign = weight.contiguous(), assign.contiguous()
        call = (x.dtype, x.shape, shape, kernels, window, groups, torch.get_num_threads(), x.stride(), y.stride())
        check(_kernel(library(), "forward", *call)(pointer(x), pointer(weight), pointer(assign), pointer(y)))
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, needs: Needs
) -> Gradients:
    weight, assign = weight.contiguous(), assign.contiguous()
    # The kernels write every weight, and the dense ones every pixel; a stride may leave pixels out of the others.
    written = torch.empty_like if grad.numel() else torch.zeros_like
    dense = _path(x.shape[1], grad.shape[1], groups) == "dense"
    grad_x = (written if dense else torch.zeros_like)(x) if needs[0] else None
    grad_weight = written(weight) if needs[1] else None
    grad_assign = torch.zeros_like(assign, dtype=torch.float32) if needs[2] else None
    if grad.numel():
        strides = x.stride(), grad.stride(), (x if grad_x is None else grad_x).stride()
        call = (x.dtype, x.shape, grad.shape, assign.shape[1], window, groups, torch.get_num_threads(), *strides)
        tensors = (grad, x, weight, assign, grad_x, grad_weight, grad_assign)
        check(_kernel(library(), "backward", *call)(*(None if t is None else pointer(t) for t in tensors)))
    return grad_x, grad_weight, None if grad_assign is None else grad_assign.to(x.dtype)


def malleable(x: Tensor, y: Tensor, kernels: int, window: Window, groups: int, threads: int) -> Callable[..., int]:
    """Find the function that assigns and convolves, for maps of the sizes and strides of x and y, both float32."""
    built = library()
    assert not isinstance(built, str), built
    problem = _problem(x.shape, y.shape, kernels, window, groups, threads, x.stride(), y.stride())
    path = _PATHS.index(_path(x.shape[1], y.shape[1], groups))
    return functools.partial(built.malleable_conv2d, ctypes.byref(problem), path)


def check(failed: int) -> None:
    """Raise an error if a kernel says that it failed, for which there is one reason."""
    if failed:
        raise MemoryError(
            "not enough memory for the workspace of the CPU engine; fewer threads (torch.set_num_threads) need less, "
            "and MALLEABLE_ENGINE=plain none of it"
        )


def _path(channels: int, out_channels: int, groups: int) -> str:
    if groups == channels == out_channels and groups > 1:
        return "depthwise"
    narrow = channels < _FEW if groups == 1 else min(channels, out_channels) // groups < _NARROW
    return "grouped" if narrow else "dense"


@functools.lru_cache(maxsize=1024)
def _kernel(
    built: ctypes.CDLL | str, direction: str, dtype: torch.dtype, x: torch.Size, y: Sequence[int], *rest: Any
) -> Callable[..., int]:
    """Find the function for a call of such sizes, kernels, window, groups, threads and strides."""
    assert not isinstance(built, str), built
    kernels, window, groups, *others = rest
    function = getattr(built, f"{_path(x[1], y[1], groups)}_{direction}_{_SUFFIX[dtype]}")
    return functools.partial(function, ctypes.byref(_problem(x, y, kernels, window, groups, *others)))


def _problem(
    x: torch.Size,
    y: Sequence[int],
    kernels: int,
    window: Window,
    groups: int,
    threads: int,
    *strides: tuple[int, ...],
) -> Problem:
    """Describe a call of such sizes and strides, those of x, y and the gradient of x; nobody changes it afterwards."""
    left, _, top, _ = window.padding
    grid = (*window.kernel_size, *window.stride, *window.dilation, top, left)
    return Problem(x[0], x[1], y[1], kernels, groups, *x[2:], *y[2:], *grid, threads, *strides)
