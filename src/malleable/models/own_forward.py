"""Convolutions that pad their input or standardise their weights themselves, and the plain ones inside them.

timm's ``Conv2dSame``, ``StdConv2d`` and ``ScaledStdConv2dSame`` are such. They are known by what they do, not by name.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from malleable.ops.window import pair, same_padding

Pads = tuple[int, int, int, int]  # left, right, top, bottom


class Inside(NamedTuple):
    """What a convolution with a forward of its own is made of."""

    conv2d: nn.Conv2d  # plain and without padding; its weights are those that are stored
    pads: Pads | Literal["same"]
    standardise: Standardise | None


class Standardise(nn.Module):
    """Gives every filter of a weight mean 0 and variance 1, times a scale and perhaps a gain for each.

    Args:
        eps: added to the variance of a filter.
        scale: of all filters.
        gain: of each filter, (O, 1, 1, 1).
    """

    def __init__(self, eps: float, scale: float = 1.0, gain: nn.Parameter | None = None) -> None:
        super().__init__()
        self.eps, self.scale, self.gain = eps, scale, gain

    def forward(self, weight: Tensor) -> Tensor:
        """Map weight (O, C, kh, kw) to one of the same shape."""
        scale = self.scale if self.gain is None else self.gain * self.scale
        return F.layer_norm(weight, weight.shape[1:], eps=self.eps) * scale

    def extra_repr(self) -> str:
        return f"eps={self.eps}, scale={self.scale:g}"

    def for_kernels(self, kernels: int) -> Standardise:
        """Make one for as many copies of the filters, each with its own gain."""
        if self.gain is None:
            return Standardise(self.eps, self.scale)
        gain = nn.Parameter(torch.cat([self.gain.detach()] * kernels), self.gain.requires_grad)
        return Standardise(self.eps, self.scale, gain)


def plain_inside(conv2d: nn.Conv2d) -> Inside | None:
    """Find the plain convolution in a subclass that pads its input with zeros, or standardises its weights, or both.

    The subclass is tried on maps of several sizes, in training and in eval mode. None if it does anything else, or pads
    by a rule that is neither constant nor TensorFlow's ``"same"``.
    """
    kernel_size, stride, dilation = (
        pair(name, getattr(conv2d, name), minimum=1) for name in ("kernel_size", "stride", "dilation")
    )
    smallest = max(k * d for k, d in zip(kernel_size, dilation, strict=True))
    twin = copy.deepcopy(conv2d, {id(p): p for p in conv2d.parameters()})
    for hooks in (twin._forward_hooks, twin._forward_pre_hooks):
        hooks.clear()  # what they do is no part of the convolution
    seen: dict[int, Pads] = {}
    standardise = None
    for size, training in product(range(smallest, smallest + max(stride) + 1), (True, False)):
        ran = _run(twin.train(training), conv2d.weight.new_zeros(1, conv2d.in_channels, size, size))
        if ran is None or seen.setdefault(size, ran[0]) != ran[0]:
            return None
        if ran[1] is not conv2d.weight:
            standardise = standardise or _standardise(twin, smallest)
            if standardise is None:
                return None
    plain = copy.copy(conv2d)
    plain.__class__ = nn.Conv2d
    plain.padding = (0, 0)
    if len(set(seen.values())) == 1:
        return Inside(plain, seen[smallest], standardise)
    same = {n: same_padding((n, n), kernel_size, stride, dilation) for n in seen}
    return Inside(plain, "same", standardise) if seen == same else None


def _standardise(conv2d: nn.Conv2d, size: int) -> Standardise | None:
    """Find the rule by which the convolution standardises its weights; None if it computes them in another way.

    The rule is read from the attributes that timm and transformers give it, and tried on weights drawn at random.
    """
    eps: Any = getattr(conv2d, "eps", None)
    scale: Any = getattr(conv2d, "scale", 1.0)
    others = {name for name, _ in conv2d.named_parameters()} - {"weight", "bias"}
    if not isinstance(eps, float) or not isinstance(scale, float) or others - {"gain"} or list(conv2d.buffers()):
        return None
    twin = copy.deepcopy(conv2d).to_empty(device="cpu").double()
    random = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        parameter.data.normal_(std=0.01, generator=random)  # so small that eps matters
    expected = Standardise(eps, scale, twin._parameters.get("gain"))(twin.weight)
    x = torch.randn(1, conv2d.in_channels, size, size, dtype=torch.float64, device="cpu", generator=random)
    for training in (True, False):
        ran = _run(twin.train(training), x)
        if ran is None or not torch.allclose(ran[1], expected, rtol=1e-9, atol=1e-12):
            return None
    return Standardise(eps, scale, conv2d._parameters.get("gain"))


@torch.no_grad()
def _run(conv2d: nn.Conv2d, x: Tensor) -> tuple[Pads, Tensor] | None:
    """Tell how ``conv2d`` pads x, and the weight it convolves with; None if it does anything else to x."""
    with _Operators() as operators:
        try:
            conv2d(x)
        except Exception:  # foreign code may fail in any way
            return None
    pads = [0, 0, 0, 0]
    *before, (last, args, _) = operators.ran or [(None, (), None)]
    if last is not torch.ops.aten.convolution.default:
        return None
    padded, weight, bias, stride, padding, dilation, *_ = args
    steps = (pair(name, getattr(conv2d, name), minimum=1) for name in ("stride", "dilation"))
    if bias is not conv2d.bias or (tuple(stride), tuple(dilation)) != tuple(steps):
        return None
    for func, arguments, result in before:
        if not any(value is x for value in tree_leaves(arguments)):
            if weight is conv2d.weight:
                return None
            continue  # it computes the weight
        if func is not torch.ops.aten.constant_pad_nd.default or any(arguments[2:]):
            return None
        pads = [a + b for a, b in zip(pads, arguments[1], strict=True)]
        x = result
    if padded is not x:
        return None
    top, left = padding
    return (pads[0] + left, pads[1] + left, pads[2] + top, pads[3] + top), weight


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what ran, in order: operator, arguments, result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ran.append((func, args, result))
        return result
