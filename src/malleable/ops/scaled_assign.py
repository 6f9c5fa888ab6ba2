"""``malleable::scaled_assign`` computes s_k · g_k of the malleable layer in one pass over d on the CPU.

The equations themselves are in ``malleable/assign.py``; this is their fast twin, and keeps nothing but d for backward.
Where there is no C++ library, autograd differentiates the equations: no graph can be recorded inside an operator.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from malleable.assign import malleable_assign, malleable_logits
from malleable.ops.depth_conv2d import check_shape
from malleable.ops.direct import asked_once, is_batched, is_direct, is_exporting, is_recorded, is_transformed, pointer
from malleable.ops.engines import wish
from malleable.ops.engines.native.build import library
from malleable.ops.whole import is_whole

_MOST_KERNELS = 30  # as in csrc/assign.cpp


def scaled_assign(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    """Return scale_k · g_k(d), (N, K, taps, Hout, Wout).

    d is (N, taps, Hout, Wout), centers are (K + 2,), temperature is a scalar and scale (K,).
    """
    if is_direct(d, centers, temperature, scale) and fits(d, centers, temperature, scale):
        if is_recorded(d, centers, temperature, scale):
            return cast(Tensor, _Recorded.apply(d, centers, temperature, scale))
        return _forward(d, centers, temperature, scale)
    if is_exporting():
        in_graph = _operator if is_whole(d) else _assign_in_graph
        return cast(Tensor, in_graph(d, centers, temperature, scale))
    fast = d.device.type == "cpu" and d.dtype == torch.float32 and len(scale) <= _MOST_KERNELS
    counted = isinstance(d, FakeTensor)  # only shapes are asked for: no reason to build anything
    if fast and not counted and not is_transformed() and _is_usable():
        return cast(Tensor, _operator(d, centers, temperature, scale))
    return _equation(d, centers, temperature, scale)


def _equation(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    return malleable_assign(d, centers, temperature) * scale.view(1, -1, *[1] * (d.ndim - 1))


def _assign_in_graph(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    """Compute the same for other runtimes: their softmax is slow over the second axis, their products over subnormals.

    What is below exp(−60) counts as that, which no sum with a weight of ordinary size can tell from 0.
    """
    h = malleable_logits(d, centers, temperature)
    e = (h - h.amax(1, keepdim=True)).clamp(min=-60.0).exp()
    return e[:, 1:-1] * (scale.view(1, -1, *[1] * (d.ndim - 1)) / e.sum(1, keepdim=True))


def temperature_of(raw: Tensor, bend: float, coldest: float) -> Tensor:
    """Return ``raw`` itself down to ``bend``, below it a hyperbola to 0, and never less than ``coldest``."""
    t = torch.where(raw < bend, bend**2 / (2 * bend - raw.clamp(max=bend)), raw)
    return t + (coldest - t).clamp(min=0).detach()


def fits(*tensors: Tensor) -> bool:
    """Tell whether the C++ can compute with d, centers, a temperature, K numbers, and another one if given."""
    for t in tensors:
        if t.dtype != torch.float32:
            return False
    d, centers, temperature, scale, *gain = tensors
    kernels = scale.numel()
    if d.ndim != 4 or kernels > _MOST_KERNELS or centers.shape != (kernels + 2,) or scale.ndim != 1:
        return False
    return all(t.ndim == 0 for t in (temperature, *gain)) and _is_usable()


@asked_once
def _is_usable() -> bool:
    """Tell whether there is a C++ twin, and no other engine was asked for. Compilers ask once, as they trace."""
    return wish() in ("auto", "native") and not isinstance(library(), str)


@torch.library.custom_op("malleable::scaled_assign", mutates_args=())
def _operator(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    return _forward(d, centers, temperature, scale)


def _forward(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    _check(d, centers, temperature, scale)
    d, centers, scale = d.contiguous(), centers.contiguous(), scale.contiguous()
    out = _new_output(d, len(scale))
    _call("malleable_assign", d, len(scale), centers, temperature.item(), scale, out)
    return out


@_operator.register_fake
def _(d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
    _check_single_on_cpu(d=d, centers=centers, temperature=temperature, scale=scale)
    return _new_output(d, scale.shape[0])


def _new_output(d: Tensor, kernels: int) -> Tensor:
    return d.new_empty((d.shape[0], kernels, *d.shape[1:]))


@torch.library.custom_op("malleable::scaled_assign_backward", mutates_args=())
def _backward(
    grad: Tensor, d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_d, *others = gradients(grad, d, centers, temperature, scale)
    assert grad_d is not None
    a, b, c = (t.clone() for t in others)
    return grad_d, a, b, c


def gradients(
    grad: Tensor, d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor, of_d: bool = True
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Compute the gradients of d, unless it needs none, centers, temperature and scale in C++, past autograd."""
    _check(d, centers, temperature, scale, grad)
    grad, d, centers, scale = (t.contiguous() for t in (grad, d, centers, scale))
    kernels = len(scale)
    grad_d, sums = torch.empty_like(d) if of_d else None, d.new_empty(2 * kernels + 3, dtype=torch.float64)
    _call("malleable_assign_backward", d, kernels, centers, temperature.item(), scale, grad_d, sums, first=grad)
    sums = sums.to(d.dtype)
    return grad_d, sums[: kernels + 2], sums[kernels + 2], sums[kernels + 3 :]


@_backward.register_fake
def _(grad: Tensor, d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    _check_single_on_cpu(grad=grad, d=d, centers=centers, temperature=temperature, scale=scale)
    return d.new_empty(d.shape), *map(torch.empty_like, (centers, temperature, scale))


def _through_operator(grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    if not is_recorded(grad, *saved):
        return cast(tuple[Tensor, ...], _backward(grad, *saved))
    with torch.enable_grad():  # these can be differentiated again
        d, centers, temperature, scale = inputs = [t.view_as(t) for t in saved]
        y = _equation(d, centers, temperature, scale)
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return tuple(next(found) if t.requires_grad else None for t in inputs)


_operator.register_autograd(
    lambda ctx, grad: _through_operator(grad, ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _call(function: str, d: Tensor, kernels: int, *rest: Tensor | float | None, first: Tensor | None = None) -> None:
    """Run a function of the C++ library: ``first`` if there is one, d, the rest; tensors are contiguous."""
    built = library()
    if isinstance(built, str):
        raise RuntimeError(f"malleable::scaled_assign is C++ only: {built}")
    shape = d.shape
    given = (d, *rest) if first is None else (first, d, *rest)
    arguments = [pointer(a) if isinstance(a, Tensor) else a for a in given]
    getattr(built, function)(shape[0], prod(shape[1:]), kernels, *arguments, torch.get_num_threads())


class _Recorded(torch.autograd.Function):
    """Runs the operator and its gradient for autograd alone, past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, d: Tensor, centers: Tensor, temperature: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(d, centers, temperature, scale)
        return _forward(d, centers, temperature, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing gives each of them away once
        if is_recorded(grad, *saved) or is_batched(grad) or not is_direct(grad, *saved):
            return _through_operator(grad, saved)
        d, centers, temperature, scale = saved
        return gradients(grad, d, centers, temperature, scale, ctx.needs_input_grad[0])


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
