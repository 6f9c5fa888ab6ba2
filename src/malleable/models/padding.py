"""Convolutions that pad their input themselves, as timm's ``Conv2dSame`` does, and the plain ones inside them."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from malleable.ops.window import pair, same_padding

Pads = tuple[int, int, int, int]  # left, right, top, bottom


def plain_inside(conv2d: nn.Conv2d) -> tuple[nn.Conv2d, Pads | Literal["same"]] | None:
    """Find the plain convolution that a subclass runs on what it padded with zeros, and how it pads.

    The subclass is tried on maps of several sizes. None if it does anything else, or pads by a rule that is neither
    constant nor TensorFlow's ``"same"``.
    """
    kernel_size, stride, dilation = (
        pair(name, getattr(conv2d, name), minimum=1) for name in ("kernel_size", "stride", "dilation")
    )
    plain = nn.Conv2d(
        conv2d.in_channels, conv2d.out_channels, kernel_size, stride, 0, dilation, conv2d.groups, device="meta"
    )
    plain.weight, plain.bias = conv2d.weight, conv2d.bias
    plain.train(conv2d.training)
    smallest = max(k * d for k, d in zip(kernel_size, dilation, strict=True))
    seen = {size: _pads(conv2d, size) for size in range(smallest, smallest + max(stride) + 1)}
    if None in seen.values():
        return None
    if len(set(seen.values())) == 1:
        return plain, next(pads for pads in seen.values() if pads)
    same = {n: same_padding((n, n), kernel_size, stride, dilation) for n in seen}
    return (plain, "same") if seen == same else None


@torch.no_grad()
def _pads(conv2d: nn.Conv2d, size: int) -> Pads | None:
    x = conv2d.weight.new_zeros(1, conv2d.in_channels, size, size)
    twin = copy.deepcopy(conv2d, {id(p): p for p in conv2d.parameters()})
    with _Operators() as operators:
        try:
            twin(x)
        except Exception:  # foreign code may fail in any way
            return None
    pads = [0, 0, 0, 0]
    *before, (last, args) = operators.ran or [(None, ())]
    if last is not torch.ops.aten.convolution.default or args[1] is not conv2d.weight:
        return None
    if args[2] is not conv2d.bias or tuple(args[3]) != tuple(conv2d.stride) or tuple(args[5]) != tuple(conv2d.dilation):
        return None
    for func, arguments in before:
        if func is not torch.ops.aten.constant_pad_nd.default or any(arguments[2:]):
            return None
        pads = [a + b for a, b in zip(pads, arguments[1], strict=True)]
    top, left = args[4]
    return pads[0] + left, pads[1] + left, pads[2] + top, pads[3] + top


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what ran, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append((func, args))
        return func(*args, **(kwargs or {}))
