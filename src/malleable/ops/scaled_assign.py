"""``malleable::scaled_assign``: s_k · g_k of the malleable layer as one operator, in one pass over d on the CPU.

The equations themselves are in ``malleable/assign.py``; this is their fast twin, and keeps nothing but d for backward.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, cast

import torch
from torch import Tensor

from malleable.assign import malleable_assign
from malleable.ops.build import library

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
    if fast and not torch.compiler.is_exporting():
        return cast(Tensor, _operator(d, centers, temperature, scale))
    return _plain(d, centers, temperature, scale)


def _library() -> ctypes.CDLL | None:
    """The C++ twin, unless another engine than it was asked for or it cannot be built."""
    if os.environ.get("MALLEABLE_ENGINE", "") not in ("", "auto", "native"):
        return None
    built = library()
    return None if isinstance(built, str) else built


def _plain(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    return malleable_assign(d, centers, temperature) * scale.view(1, -1, *[1] * (d.ndim - 1))


@torch.library.custom_op("malleable::scaled_assign", mutates_args=())
def _operator(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    built = _library()
    if built is None:
        return _plain(d, centers, temperature, scale)
    d, centers, scale = d.contiguous(), centers.contiguous(), scale.contiguous()
    out = _new_output(d, scale)
    built.malleable_assign(
        *_sizes(d, scale), _pointer(d), _pointer(centers), ctypes.c_float(temperature.item()), _pointer(scale),
        _pointer(out), torch.get_num_threads(),
    )  # fmt: skip
    return out


@_operator.register_fake
def _(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    return _new_output(d, scale)


def _new_output(d: Tensor, scale: Tensor) -> Tensor:
    return d.new_empty(d.shape[0], scale.shape[0], *d.shape[1:])


@torch.library.custom_op("malleable::scaled_assign_backward", mutates_args=())
def _backward(
    grad: Tensor, d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    built = _library()
    if built is None:
        leaves = [t.detach().requires_grad_() for t in (d, centers, temperature, scale)]
        with torch.enable_grad():
            y = _plain(*leaves)
        return torch.autograd.grad(y, leaves, grad)  # type: ignore[return-value]
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


def _sizes(d: Tensor, scale: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]:
    batch = d.shape[0]
    return ctypes.c_int64(batch), ctypes.c_int64(d.numel() // max(batch, 1)), ctypes.c_int32(len(scale))


def _pointer(t: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())
