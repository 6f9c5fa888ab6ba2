"""Count parameters and multiply-adds of a network, and compute the paper's Table 1.

Multiply-adds are those of convolutions and matrix products; a layer with K kernels has K times those of its
convolution. What the layers need to assign taps to kernels is counted beside them, from the formulas, one for each
−, ×, ÷, exp and comparison at a tap of an output pixel. Changes of sign are free, and so is what is done once a pixel
or once a layer: 1 / unit(i), into which 1 / √t is folded, and gain · s_k.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from malleable.layers import Conv25d, DepthAwareConv2d, DepthConv2d, MalleableConv2d
from malleable.models.summary import sees_depth


@dataclass(frozen=True)
class Cost:
    """Tells what one forward pass costs."""

    parameters: int
    products: int  # multiply-adds of convolutions and matrix products
    assignment: int  # operations that assign taps to kernels

    @property
    def multiply_adds(self) -> int:
        return self.products + self.assignment


def measure(net: nn.Module, size: Sequence[int], batch: int = 1, channels: int = 3) -> Cost:
    """Count what ``net`` costs on ``batch`` images of ``size`` (height, width), without computing anything.

    Args:
        net: a converted network or ``deeplabv3plus``, called with depth, or any network that takes images alone.
    """
    height, width = size
    shared = {id(t): t for t in (*net.parameters(), *net.buffers())}
    twin = copy.deepcopy(net, shared).eval()
    layers = [module for module in twin.modules() if isinstance(module, DepthConv2d)]
    operations: list[int] = []

    def count(layer: DepthConv2d, args: object, output: torch.Tensor) -> None:
        pixels = output.shape[0] * output.shape[2] * output.shape[3]
        operations.append(operations_per_tap(layer) * layer.window.taps * pixels)

    for layer in layers:
        layer.register_forward_hook(count)
    counter = FlopCounterMode(display=False)
    dtype = next((parameter.dtype for parameter in net.parameters()), torch.float32)
    with FakeTensorMode(), torch.no_grad(), counter:
        tensors = dict(chain(twin.named_parameters(), twin.named_buffers()))
        fakes = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        image = torch.empty(batch, channels, height, width, dtype=dtype)
        depth = {"depth": torch.empty(batch, 1, height, width), "focal": float(width)} if sees_depth(twin) else {}
        functional_call(twin, fakes, (image,), depth)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    return Cost(parameters, counter.get_total_flops() // 2, sum(operations))


def operations_per_tap(layer: DepthConv2d) -> int:
    """Count the operations that assign one tap of one output pixel to the kernels."""
    kernels = layer.kernels
    if isinstance(layer, MalleableConv2d):
        difference = 2  # −, × 1 / unit
        logits = 2 * (kernels + 2)  # − a_k, square
        softmax = (kernels + 2) + (kernels + 1) + kernels  # exp, sum, ÷
        return difference + logits + softmax + kernels  # × s_k
    if isinstance(layer, Conv25d):
        return 2 + (kernels + 1)  # the difference; a comparison with each border of the cells
    if isinstance(layer, DepthAwareConv2d):
        return 3  # −, × α, exp
    raise TypeError(f"layer must be one of this library's convolutions, got {type(layer).__name__}")


@dataclass(frozen=True)
class Row:
    """Holds one line of Table 1. Multiply-adds are in G, parameters in M; None stands where the paper has no number."""

    method: str
    kernels: int
    multiply_adds: float
    parameters: float
    assignment: float
    paper_multiply_adds: float | None = None
    paper_parameters: float | None = None


_PAPER_SETTING = ("resnet101s", (768, 768), 19, 16, False)
_METHODS = [  # with the paper's multiply-adds and parameters
    ("Baseline", None, 1, (215.673, 59.468)),
    ("Depth-aware", "depth_aware", 1, (215.675, 59.468)),
    ("Malleable 2.5D", "malleable", 1, (215.679, 59.468)),
    ("2.5D", "conv25d", 3, (234.701, 65.734)),
    ("Malleable 2.5D", "malleable", 3, (234.711, 65.734)),
]


def table(
    backbone: str = "resnet101s",
    size: Sequence[int] = (768, 768),
    classes: int = 19,
    output_stride: int = 16,
    merge: bool | Literal["released"] = False,
) -> list[Row]:
    """Compute the paper's Table 1 for DeepLabv3+ on any backbone and image size; the defaults are the paper's."""
    from malleable.models import DeepLabV3Plus

    is_paper = (backbone, tuple(size), classes, output_stride, merge) == _PAPER_SETTING
    rows = []
    for method, conv, kernels, paper in _METHODS:
        with torch.device("meta"):
            net = DeepLabV3Plus(backbone, classes, conv, kernels, output_stride=output_stride, merge=merge)
        cost = measure(net, size)
        numbers = (cost.multiply_adds / 1e9, cost.parameters / 1e6, cost.assignment / 1e9)
        rows.append(Row(method, kernels, *numbers, *(paper if is_paper else ())))
    return rows
