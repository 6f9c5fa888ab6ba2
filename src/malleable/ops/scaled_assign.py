"""``malleable::scaled_assign``: s_k · g_k of the malleable layer as one operator, in one pass over d on the CPU.

The equations themselves are in ``malleable/assign.py``; this is their fast twin, and keeps nothing but d for backward.
Where there is no C++ library, autograd differentiates the equations: no graph can be recorded inside an operator.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from malleable.assign import malleable_assign
from malleable.ops.depth_conv2d import check_shape
from malleable.ops.engines import wish
from malleable.ops.engines.native.build import library

_MOST_KERNELS = 30  # as in csrc/assign.cpp


def scaled_assign(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    """scale_k · g_k(d).

    Args:
        d: (N, taps, Hout, Wout) relative depth differences.
        centers: (K + 2,)
        temperature: scalar.
        scale: (K,)

    Returns:
        (N, K, taps, Hout, Wout)
    """
    fast = d.device.type == "cpu" and d.dtype == torch.float32 and len(scale) <= _MOST_KERNELS
    counted = isinstance(d, FakeTensor)  # only shapes are asked for: no reason to build anything
    if fast and not counted and not torch.compiler.is_exporting() and _is_usable():
        return cast(Tensor, _operator(d, centers, temperature, scale))
    return malleable_assign(d, centers, temperature) * scale.view(1, -1, *[1] * (d.ndim - 1))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_usable() -> bool:
    """Whether there is a C++ twin, and no other engine was asked for. Compilers ask once, as they trace."""
    return wish() in ("auto", "native") and not isinstance(library(), str)


def _library() -> ctypes.CDLL:
    built = library()
    if isinstance(built, str):
        raise RuntimeError(f"malleable::scaled_assign is C++ only: {built}")
    return built


@torch.library.custom_op("malleable::scaled_assign", mutates_args=())
def _operator(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    _check(d, centers, temperature, scale)
    built = _library()
    d, centers, scale = d.contiguous(), centers.contiguous(), scale.contiguous()
    out = _new_output(d, scale)
    built.malleable_assign(
        *_sizes(d, scale), _pointer(d), _pointer(centers), ctypes.c_float(temperature.item()), _pointer(scale),
        _pointer(out), torch.get_num_threads(),
    )  # fmt: skip
    return out


@_operator.register_fake
def _(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    _check_single_on_cpu(d=d, centers=centers, temperature=temperature, scale=scale)
    return _new_output(d, scale)


def _new_output(d: Tensor, scale: Tensor) -> Tensor:
    return d.new_empty(d.shape[0], scale.shape[0], *d.shape[1:])


@torch.library.custom_op("malleable::scaled_assign_backward", mutates_args=())
def _backward(
    grad: Tensor, d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(d, centers, temperature, scale, grad)
    built = _library()
    grad, d, centers, scale = (t.contiguous() for t in (grad, d, centers, scale))
    kernels = len(scale)
    grad_d, sums = torch.empty_like(d), torch.empty(2 * kernels + 3, dtype=torch.float64)
    built.malleable_assign_backward(
        *_sizes(d, scale), _pointer(grad), _pointer(d), _pointer(centers), ctypes.c_float(temperature.item()),
        _pointer(scale), _pointer(grad_d), _pointer(sums), torch.get_num_threads(),
    )  # fmt: skip
    sums = sums.to(d.dtype)
    return grad_d, sums[: kernels + 2].clone(), sums[kernels + 2].clone(), sums[kernels + 3 :].clone()


@_backward.register_fake
def _(
    grad: Tensor, d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_single_on_cpu(grad=grad, d=d, centers=centers, temperature=temperature, scale=scale)
    return (
        d.new_empty(d.shape),
        torch.empty_like(centers),
        torch.empty_like(temperature),
        torch.empty_like(scale),
    )


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return cast(tuple[Tensor, ...], _backward(grad, *ctx.saved_tensors))


_operator.register_autograd(_differentiate, setup_context=_keep)


def _check(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor, grad: Tensor | None = None) -> None:
    """Refuse what the operator cannot compute, and a gradient that is not of its output."""
    _check_single_on_cpu(d=d, centers=centers, temperature=temperature, scale=scale, grad=grad)
    if d.ndim != 4:
        raise ValueError(f"d must have shape (N, taps, Hout, Wout), got {tuple(d.shape)}")
    if scale.ndim != 1 or not 1 <= scale.shape[0] <= _MOST_KERNELS:
        raise ValueError(f"scale must have shape (K,), K from 1 to {_MOST_KERNELS}, got {tuple(scale.shape)}")
    check_shape("centers", centers, "(K + 2,)", (scale.shape[0] + 2,))
    check_shape("temperature", temperature, "of a scalar", ())
    if grad is not None:
        check_shape("grad", grad, "(N, K, taps, Hout, Wout)", (d.shape[0], scale.shape[0], *d.shape[1:]))


def _check_single_on_cpu(**tensors: Tensor | None) -> None:
    """Refuse tensors that are not float32 on the CPU."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {tensor.dtype}")


def _sizes(d: Tensor, scale: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]:
    batch = d.shape[0]
    return ctypes.c_int64(batch), ctypes.c_int64(d.numel() // max(batch, 1)), ctypes.c_int32(len(scale))


def _pointer(t: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())
