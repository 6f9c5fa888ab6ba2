"""``depth_conv2d`` calls a PyTorch operator that checks, chooses an engine and runs it; gradient and cost are here too.

The operator checks its arguments itself, because kernels trust them: a wrong shape would have them read outside of
memory. Devices and dtypes are also checked while a graph is traced; sizes are not, a compiler would have to prove each.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from malleable.ops.direct import asked_once, is_batched, is_direct, is_exporting, is_recorded, is_transformed
from malleable.ops.engines import ENGINES, Engine, check_engine, choose, instead, plain, wish
from malleable.ops.engines.plain import output_format
from malleable.ops.engines.triton import LaunchError
from malleable.ops.whole import is_whole, whole_conv2d
from malleable.ops.window import Pair, Window, pair


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
    """Convolve with K kernels whose taps are weighted pixel by pixel (paper, Eq. 8).

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
    window = Window.of(_kernel_size(weight), stride, padding, dilation)
    return convolve(x, weight, assign, bias, window, groups, engine)


def convolve(
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    bias: Tensor | None,
    window: Window,
    groups: int,
    engine: str = "auto",
    center: Tensor | None = None,
) -> Tensor:
    """Run :func:`depth_conv2d` for a caller that has a window already.

    ``center`` (K,) is the assign of the center tap where all pixels have the same; an exported graph makes use of it.
    """
    device = x.device.type
    if _has_autocast(device) and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if assign.dtype != x.dtype:
        assign = assign.to(x.dtype)
    if is_exporting():
        _check_alike(x, weight=weight, assign=assign, bias=bias)
        if is_whole(x):
            return cast(Tensor, whole_conv2d(x, weight, assign, bias, center, *_settings(window, groups, engine)[:-1]))
        return _equation(x, weight, assign, bias, window, groups, center)
    if not torch.compiler.is_compiling() and (x.is_meta or isinstance(x, FakeTensor)):  # no kernel will see these
        check_engine(engine)
        _check(x, weight, assign, bias, window, groups)
    if is_direct(x, weight, assign, bias):
        if is_recorded(x, weight, assign, bias):
            return cast(Tensor, _Recorded.apply(x, weight, assign, bias, window, groups, engine))
        return _forward(x, weight, assign, bias, window, groups, engine)
    if is_transformed():
        check_engine(engine)
        _check(x, weight, assign, bias, window, groups)
        return _equation(x, weight, assign, bias, window, groups)
    return cast(Tensor, operator(x, weight, assign, bias, *_settings(window, groups, engine)))


@asked_once
def _has_autocast(device: str) -> bool:  # PyTorch 2.7 cannot compile the question
    return torch.amp.is_autocast_available(device)


def _equation(
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    bias: Tensor | None,
    window: Window,
    groups: int,
    center: Tensor | None = None,
) -> Tensor:
    """Compute it with PyTorch's own operators, of which exporters and transforms know everything."""
    y = plain.forward(x, weight, assign, window, groups, None if center is None else center.to(x.dtype))
    return y if bias is None else y + bias.view(-1, 1, 1)


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
    window = _window(weight, stride, padding, dilation)
    return _forward(x, weight, assign, bias, window, groups, engine)


@operator.register_fake
def _(x: Tensor, weight: Tensor, assign: Tensor, bias: Tensor | None, *settings: object) -> Tensor:
    _check_alike(x, weight=weight, assign=assign, bias=bias)
    shape = (x.shape[0], weight.shape[0] // assign.shape[1], *assign.shape[-2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=output_format(x, weight))


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
    """Compute the gradients of x, weight and assign; an empty tensor stands for one that is not needed."""
    window = _window(weight, stride, padding, dilation)
    if len(needs) != 3:
        raise ValueError(f"needs must be three booleans, for x, weight and assign, got {list(needs)}")
    gradients = _backward(grad, x, weight, assign, window, groups, engine, needs)
    a, b, c = (t.new_empty(0) if g is None else g for g, t in zip(gradients, (x, weight, assign), strict=True))
    return a, b, c


@operator_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    _check_alike(x, weight=weight, assign=assign, grad=grad)
    pairs = zip((x, weight, assign), settings[-1], strict=True)
    return tuple(torch.empty_like(t) if need else t.new_empty(0) for t, need in pairs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, assign, _, *ctx.settings = inputs
    ctx.save_for_backward(x, weight, assign)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved, needs = ctx.saved_tensors, list(ctx.needs_input_grad[:3])
    found: list[Tensor | None] = [None] * 3
    if any(needs) and is_recorded(grad, *saved):
        stride, padding, dilation, groups, _ = ctx.settings
        found = _recorded_gradients(grad, saved, _window(saved[1], stride, padding, dilation), groups, needs)
    elif any(needs):
        found = _through_operator(grad, saved, ctx.settings, needs)
    grad_bias = grad.sum((0, 2, 3)) if ctx.needs_input_grad[3] else None
    return (*found, grad_bias, *[None] * len(ctx.settings))


def _through_operator(
    grad: Tensor, saved: tuple[Tensor, ...], settings: Sequence[Any], needs: list[bool]
) -> list[Tensor | None]:
    computed = operator_backward(grad, *saved, *settings, needs)
    return [g if need else None for g, need in zip(computed, needs, strict=True)]


def _recorded_gradients(
    grad: Tensor, saved: tuple[Tensor, ...], window: Window, groups: int, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Compute gradients that can be differentiated again, as autograd does it for the equation in PyTorch."""
    with torch.enable_grad(), without_autocast(grad.device.type):
        x, weight, assign = inputs = [t.view_as(t) for t in saved]
        y = plain.forward(x, weight, assign, window, groups)
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs]


operator.register_autograd(_differentiate, setup_context=_keep)


class _Recorded(torch.autograd.Function):
    """Runs the operator and its gradient for autograd alone, past the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        assign: Tensor,
        bias: Tensor | None,
        window: Window,
        groups: int,
        engine: str,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, assign)
        ctx.call = (window, groups, engine)
        return _forward(x, weight, assign, bias, window, groups, engine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing gives each of them away once
        window, groups, engine = ctx.call
        needs = ctx.needs_input_grad
        found = gradients(grad, saved, window, groups, engine, needs[:3])
        return (*found, grad.sum((0, 2, 3)) if needs[3] else None, None, None, None)


def gradients(
    grad: Tensor, saved: tuple[Tensor, ...], window: Window, groups: int, engine: str, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Compute the gradients of x, weight and assign, None where not needed, in the way that suits who asks."""
    if not any(needs):
        return [None] * 3
    if is_recorded(grad, *saved):
        return _recorded_gradients(grad, saved, window, groups, needs)
    if is_batched(grad) or not is_direct(grad, *saved):
        return _through_operator(grad, saved, _settings(window, groups, engine), list(needs))
    x, weight, assign = saved
    return _backward(grad, x, weight, assign, window, groups, engine, needs)


def _settings(window: Window, groups: int, engine: str) -> tuple[list[int], list[int], list[int], int, str]:
    """List what the operator takes besides tensors."""
    return list(window.stride), list(window.padding), list(window.dilation), groups, engine


def _forward(
    x: Tensor, weight: Tensor, assign: Tensor, bias: Tensor | None, window: Window, groups: int, engine: str
) -> Tensor:
    run = engine_for(x, weight, assign, bias, window, groups, engine)
    with without_autocast(x.device.type):
        try:
            y = run.forward(x, weight, assign, window, groups)
        except LaunchError as error:
            y = instead(error, engine, x, weight, assign, window, groups).forward(x, weight, assign, window, groups)
    if bias is not None:
        y += bias.view(-1, 1, 1)
    return y.contiguous(memory_format=output_format(x, weight))


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    window: Window,
    groups: int,
    engine: str,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Compute the gradients of x, weight and assign, laid out as these are; None where not needed."""
    run = engine_for(x, weight, assign, None, window, groups, engine)
    _check_alike(x, grad=grad)
    expected = (x.shape[0], weight.shape[0] // assign.shape[1], *assign.shape[-2:])
    check_shape("grad", grad, "(N, O, Hout, Wout)", expected)
    call = (x, weight, assign, window, groups)
    with without_autocast(x.device.type):
        try:
            gradients = run.backward(grad, *call, (needs[0], needs[1], needs[2]))
        except LaunchError as error:
            gradients = instead(error, engine, *call).backward(grad, *call, (needs[0], needs[1], needs[2]))
    return [
        g if g is None or (g.stride() == t.stride() and _is_alone(g)) else torch.empty_like(t).copy_(g)
        for g, t in zip(gradients, (x, weight, assign), strict=True)
    ]


def _is_alone(t: Tensor) -> bool:
    """Tell whether ``t`` is all of its memory, not a part of a larger tensor, as empty_like never is."""
    return t.untyped_storage().nbytes() == t.numel() * t.element_size()


_engines: dict[Hashable, Engine] = {}  # of CPU calls that passed the checks
_MOST_CALLS = 4096


def engine_for(
    x: Tensor, weight: Tensor, assign: Tensor, bias: Tensor | None, window: Window, groups: int, engine: str = "auto"
) -> Engine:
    """Check a call and choose its engine; once for all calls on the CPU that are alike, as layers make them."""
    tensors = (x, weight, assign) if bias is None else (x, weight, assign, bias)
    call = (engine, wish(), window, groups, *[(t.shape, t.dtype, t.device) for t in tensors])
    run = _engines.get(call)
    if run is None:
        _check(x, weight, assign, bias, window, groups)
        run = choose(engine, x, weight, assign, window, groups)
        if len(_engines) >= _MOST_CALLS:
            _engines.clear()
        if x.is_cpu and run is not ENGINES["triton"]:  # which gives up calls whose kernels cannot be started
            _engines[call] = run
    return run


def without_autocast(device: str) -> AbstractContextManager[None]:
    """Run what follows in the dtypes it comes in."""
    off = not _has_autocast(device) or not torch.is_autocast_enabled(device)
    return _NOTHING if off else cast(AbstractContextManager[None], torch.autocast(device, enabled=False))


_NOTHING = nullcontext()


@register_flop_formula(torch.ops.malleable.depth_conv2d)
def _(x: Any, weight: Any, assign: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count two per multiply-add, as for a convolution: every kernel, tap, channel and output pixel has one."""
    return int(2 * prod((x[0], *weight, *assign[-2:])))


@register_flop_formula(torch.ops.malleable.depth_conv2d_backward)
def _(grad: Any, x: Any, weight: Any, assign: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count one pass of products for x and assign together, one for the weights."""
    needs = args[-1]
    return int(2 * prod((x[0], *weight, *assign[-2:])) * ((needs[0] or needs[2]) + needs[1]))


def _window(weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Window:
    """Build the window that the operator's lists describe."""
    kernel_size = _kernel_size(weight)
    if len(padding) != 4 or min(padding) < 0:
        raise ValueError(f"padding must be four integers ≥ 0 (left, right, top, bottom), got {list(padding)}")
    left, right, top, bottom = padding
    step, spread = pair("stride", stride, minimum=1), pair("dilation", dilation, minimum=1)
    return Window(kernel_size, step, (left, right, top, bottom), spread)


def check_features(x: Tensor, weight: Tensor, window: Window, groups: int) -> None:
    """Refuse features that ``weight`` cannot be applied to."""
    shape = x.shape
    if len(shape) != 4:
        raise ValueError(f"x must have shape (N, C, H, W), got {tuple(shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}; convert integer images first, for example x.float()")
    _check_devices(x, weight=weight)
    channels, wanted = shape[1], weight.shape[1] * groups
    if groups < 1 or channels < 1:
        raise ValueError(f"groups and the channels of x must be at least 1, got {groups} and {channels}")
    if channels != wanted:
        raise ValueError(f"x must have {wanted} channels, got {channels} in {tuple(shape)}")
    if min(window.output_size(shape[2:])) < 1:
        raise ValueError(
            f"x of {shape[2]}×{shape[3]} is smaller than kernel_size {window.kernel_size} with dilation "
            f"{window.dilation}: add padding"
        )


def _check(x: Tensor, weight: Tensor, assign: Tensor, bias: Tensor | None, window: Window, groups: int) -> None:
    """Refuse what the operator cannot compute."""
    check_features(x, weight, window, groups)
    if assign.ndim != 5:
        raise ValueError(f"assign must have shape (N, K, taps, Hout, Wout), got {tuple(assign.shape)}")
    rows, kernels = weight.shape[0], assign.shape[1]
    if kernels < 1 or rows % (kernels * groups):
        raise ValueError(
            f"weight has {rows} rows, which {kernels} kernels (dimension 1 of assign) of {groups} groups cannot share"
        )
    _check_alike(x, weight=weight, assign=assign, bias=bias)
    if bias is not None:
        check_shape("bias", bias, "(O,)", (rows // kernels,))
    expected = (x.shape[0], kernels, window.taps, *window.output_size(x.shape[2:]))
    check_shape("assign", assign, "(N, K, taps, Hout, Wout)", expected)


def _check_alike(x: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors on another device or of another dtype than x."""
    _check_devices(x, **others)
    dtype = x.dtype
    for name, tensor in others.items():
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(f"x is {dtype} but {name} is {tensor.dtype}; cast one, or run under torch.autocast")


def _check_devices(x: Tensor, **others: Tensor | None) -> None:
    device = x.device
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"x is on {device} but {name} on {tensor.device}; move both to one device")


def _kernel_size(weight: Tensor) -> tuple[int, int]:
    if weight.ndim != 4:
        raise ValueError(f"weight must have shape (K·O, C / groups, kh, kw), got {tuple(weight.shape)}")
    return pair("kernel_size (dimensions 2 and 3 of weight)", weight.shape[2:], minimum=1)


def check_shape(name: str, tensor: Tensor, meaning: str, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ValueError(f"{name} must have shape {meaning} = {expected}, got {tuple(tensor.shape)}")
