"""The operators as ONNX has them: one node each while a network is traced, plain ONNX operators in the file.

Tracing takes some ten milliseconds for every operator on maps of symbolic size, and a convolution is a hundred of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from malleable.assign import FARTHEST
from malleable.ops.engines import plain
from malleable.ops.window import Window

_whole = ContextVar("whole", default=False)
_END = 2**63 - 1
_COLDEST = -60.0  # exp of it is nothing beside 1, and not a subnormal number, over which products are slow


@contextmanager
def whole_operators() -> Iterator[None]:
    """Keep convolutions and assignments whole in what is exported meanwhile, for :func:`translations`."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def is_whole(t: Tensor) -> bool:
    """Tell whether an operator on ``t`` is exported as one node; sums of half precision need casts between theirs."""
    return _whole.get() and t.dtype == torch.float32


@torch.library.custom_op("malleable::whole_conv2d", mutates_args=())
def whole_conv2d(
    x: Tensor,
    weight: Tensor,
    assign: Tensor,
    bias: Tensor | None,
    center: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Do as ``malleable::depth_conv2d``; ``center`` (K,) is assign at the center tap if that is the same everywhere."""
    y = plain.forward(x, weight, assign, _window(weight, stride, padding, dilation), groups)
    return y if bias is None else y + bias.view(-1, 1, 1)


@whole_conv2d.register_fake
def _(x: Tensor, weight: Tensor, assign: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // assign.shape[1], *assign.shape[-2:])


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Say what ``torch.onnx.export(custom_translation_table=…)`` puts for whole operators."""
    return {torch.ops.malleable.whole_conv2d.default: conv2d, torch.ops.malleable.scaled_assign.default: scaled_assign}


def _opset() -> Any:
    from onnxscript import opset18  # its types do not know that numbers become tensors

    return opset18


def conv2d(
    x: Any,
    weight: Any,
    assign: Any,
    bias: Any,
    center: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Any:
    """Write y(i) = Σ_k Σ_p assign_k(i, p) · w_k(p) · x(i + p) + bias in ONNX operators.

    A runtime writes what it weighs before it multiplies it. So only one tap is weighed at a time, for all its kernels,
    whose products are one convolution; sums are such that a convolution adds its output to them.
    """
    from onnxscript import ir

    op = _opset()
    (rows, channels, *_), kernels = weight.shape, assign.shape[1]
    out, window = rows // kernels, _window(weight, stride, padding, dilation)
    left, right, top, bottom = padding
    padded = op.Pad(x, [0, 0, top, left, 0, 0, bottom, right])
    output = op.Shape(assign, start=3)
    phases: dict[tuple[int, ...], Any] = {(0, 0): padded} if window.stride == (1, 1) else {}

    def known(map: Any, channels: int) -> Any:
        """Note the shape of a map: runtimes do not see that all are of one size, and would not add as they multiply."""
        if isinstance(map, ir.Value):
            map.dtype, map.shape = x.dtype, ir.Shape([x.shape[0], channels, *assign.shape[3:]])
        return map

    def patch(p: int) -> Any:
        """Take what tap p reads. To skip columns is slow, and done once for all taps that read the same ones."""
        offset = (p // window.kernel_size[1] * dilation[0], p % window.kernel_size[1] * dilation[1])
        phase = tuple(o % s for o, s in zip(offset, stride, strict=True))
        if phase not in phases:
            phases[phase] = op.Slice(padded, list(phase), [_END, _END], [2, 3], list(stride))
        start = [o // s for o, s in zip(offset, stride, strict=True)]
        return known(op.Slice(phases[phase], start, op.Add(output, start), [2, 3]), x.shape[1])

    w = op.Transpose(op.Reshape(weight, [kernels, out, channels, window.taps]), perm=[3, 0, 1, 2])  # (taps, K, O, c)
    terms = []
    if center is not None:
        shared = op.ReduceSum(op.Mul(op.Gather(w, window.center), op.Reshape(center, [-1, 1, 1])), [0], keepdims=0)
        read, step = (x, stride) if _is_centered(window) else (patch(window.center), (1, 1))
        terms.append(op.Conv(read, op.Unsqueeze(shared, [2, 3]), bias, group=groups, strides=list(step)))
    apart, together = (
        op.Concat(op.Constant(value_ints=[0, *sizes]), output, axis=0)
        for sizes in ((groups, 1, channels), (kernels * x.shape[1],))
    )
    for p in range(window.taps):
        if p == window.center and center is not None:
            continue
        kernel = op.Gather(w, p)  # (K, O, c)
        if groups == out == channels * groups and groups > 1:  # depthwise: the weights of each pixel first
            mixed = op.Conv(op.Gather(assign, p, axis=2), op.Unsqueeze(op.Transpose(op.Squeeze(kernel, [2])), [2, 3]))
            terms.append(op.Mul(patch(p), mixed))
            continue
        g = op.Unsqueeze(op.Slice(assign, [p], [p + 1], [2]), [1])  # (N, 1, K, 1, Hout, Wout)
        weighed = known(op.Reshape(op.Mul(op.Reshape(patch(p), apart), g), together), kernels * x.shape[1])
        kernel = op.Reshape(op.Transpose(kernel, perm=[1, 0, 2]), [out, kernels * channels, 1, 1])
        terms.append(op.Conv(weighed, kernel, group=groups))
    y = functools.reduce(lambda a, b: known(op.Add(a, b), out), (known(term, out) for term in terms))
    return y if bias is None or center is not None else op.Add(y, op.Reshape(bias, [-1, 1, 1]))


def _window(weight: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Window:
    pairs = [(int(pair[0]), int(pair[1])) for pair in (weight.shape[2:], stride, dilation)]
    left, right, top, bottom = padding
    return Window(pairs[0], pairs[1], (left, right, top, bottom), pairs[2])


def _is_centered(window: Window) -> bool:
    """Tell whether the center tap reads the map itself, from its first pixel to its last."""
    before = [k // 2 * d for k, d in zip(window.kernel_size, window.dilation, strict=True)]
    after = [(k - 1 - k // 2) * d for k, d in zip(window.kernel_size, window.dilation, strict=True)]
    return window.padding == (before[1], after[1], before[0], after[0])


def scaled_assign(d: Any, centers: Any, temperature: Any, scale: Any) -> Any:
    """Write scale_k · g_k(d) in ONNX operators; softmax is slow over the second axis, so it is written out.

    What is below exp(−60) counts as that, which no sum with a weight of ordinary size can tell from 0.
    """
    op = _opset()
    kernels = scale.shape[0]
    offset = op.Sub(op.Unsqueeze(op.Clip(d, -FARTHEST, FARTHEST), [1]), op.Reshape(centers, [1, -1, 1, 1, 1]))
    ends = (0, 1, kernels + 1, kernels + 2)
    first, inner, last = (op.Slice(offset, [a], [b], [1]) for a, b in itertools.pairwise(ends))
    squares = [op.Mul(first, op.Abs(first)), op.Mul(inner, inner), op.Neg(op.Mul(last, op.Abs(last)))]
    h = op.Mul(op.Concat(*squares, axis=1), op.Neg(op.Reciprocal(temperature)))
    e = op.Exp(op.Max(op.Sub(h, op.ReduceMax(h, [1])), _COLDEST))
    share = op.Div(op.Reshape(scale, [1, -1, 1, 1, 1]), op.ReduceSum(e, [1]))
    return op.Mul(op.Slice(e, [1], [kernels + 1], [1]), share)
