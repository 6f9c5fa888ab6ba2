"""Every layer's output and every gradient against the paper's equations as nested loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import malleable as mb
from helpers import oracle

# kernel size, stride, padding, dilation, groups, K, rate, input size
CASES: list[tuple[Any, Any, Any, Any, int, int, int, tuple[int, int]]] = [
    (3, 1, 1, 1, 1, 3, 1, (5, 6)),
    (3, 2, 1, 1, 1, 3, 2, (5, 6)),
    (3, 1, 2, 2, 1, 3, 16, (5, 5)),
    (3, 1, 1, 1, 2, 2, 4, (4, 5)),
    (3, 2, 1, 1, 4, 1, 8, (5, 3)),
    (1, 1, 0, 1, 1, 3, 3, (3, 4)),
    (2, 1, 1, 1, 1, 5, 2, (3, 4)),
    ((2, 4), (2, 1), (0, 2), 1, 1, 2, 4, (5, 4)),
    ((3, 1), (1, 3), (3, 0), (2, 1), 2, 3, 5, (4, 5)),
    (5, 3, 1, (1, 2), 1, 1, 2, (7, 9)),
]


def pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def scene(case: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """x, depth with holes of every kind, and one focal length per sample; the image is not a multiple of the rate."""
    rate, size = case[6], case[7]
    x = torch.randn(2, 4, *size, dtype=torch.float64, requires_grad=True)
    image = [rate * (n - 1) + 1 + rate // 2 if rate > 1 else n for n in size]
    focal = torch.tensor([30.0, 55.0], dtype=torch.float64) * rate
    # Differences of a few grid cells: steep enough for every kernel to get its share.
    depth = 2 + 0.1 * torch.randn(2, 1, *image, dtype=torch.float64)
    for hole, value in enumerate((0.0, -1.0, torch.nan, torch.inf)):
        depth[hole % 2, 0, rate * (hole % size[0]), rate * ((hole + 1) % size[1])] = value
    return x, depth.requires_grad_(), focal


def check(layer: Any, case: tuple[Any, ...], assign: oracle.Assign, scale: list[Tensor], names: list[str]) -> None:
    _, stride, padding, dilation, groups, _, rate, _ = case
    x, depth, focal = scene(case)
    leaves = [x, depth, *(getattr(layer, name) for name in names)]
    expected = oracle.conv(
        x, layer.weight, layer.bias, depth, focal, rate, assign, scale,
        pair(stride), pair(padding), pair(dilation), groups, layer.invalid,
    )  # fmt: skip
    y = layer(x, mb.Geometry(depth, focal))
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    direction = torch.randn_like(y)
    actual_gradients = torch.autograd.grad(y, leaves, direction, allow_unused=True)
    expected_gradients = torch.autograd.grad(expected, leaves, direction, allow_unused=True)
    for name, actual, wanted in zip(["x", "depth", *names], actual_gradients, expected_gradients, strict=True):
        wanted = torch.zeros(()) if wanted is None else torch.nan_to_num(wanted)
        actual = torch.zeros(()) if actual is None else actual
        torch.testing.assert_close(
            actual, wanted.expand_as(actual).to(actual), rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )


def build(cls: Any, case: tuple[Any, ...], **options: Any) -> Any:
    kernel, stride, padding, dilation, groups, kernels, _, _ = case
    options = {"kernels": kernels, **options} if cls is not mb.DepthAwareConv2d else options
    return cls(4, 8, kernel, stride, padding, dilation, groups, dtype=torch.float64, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_malleable(case: tuple[Any, ...]) -> None:
    layer = build(mb.MalleableConv2d, case)
    with torch.no_grad():
        layer.centers += 0.2 * torch.randn_like(layer.centers)
        layer.raw_temperature.fill_(0.8)
        layer.rebalance.normal_()
        layer.gain.fill_(1.3)
    scale = [1.3 * s for s in oracle.scales(layer.rebalance)]
    assign = oracle.malleable(layer.centers, layer.raw_temperature)
    check(layer, case, assign, scale, ["weight", "bias", "centers", "raw_temperature", "rebalance"])


@pytest.mark.parametrize("invalid", ["uniform", "ignore"])
def test_malleable_invalid(invalid: str) -> None:
    layer = build(mb.MalleableConv2d, CASES[0], invalid=invalid)
    assign = oracle.malleable(layer.centers, layer.raw_temperature)
    names = ["weight", "bias", "centers", "raw_temperature", "rebalance"]
    check(layer, CASES[0], assign, oracle.scales(layer.rebalance), names)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conv25d(case: tuple[Any, ...]) -> None:
    one = torch.ones((), dtype=torch.float64)
    check(build(mb.Conv25d, case), case, oracle.hard(case[5]), [one] * case[5], ["weight", "bias"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_depth_aware(case: tuple[Any, ...]) -> None:
    one = torch.ones((), dtype=torch.float64)
    check(build(mb.DepthAwareConv2d, case, alpha=3.0), case, oracle.depth_aware(3.0), [one], ["weight", "bias"])


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[6]], ids=str)
def test_depth_aware_pooling(case: tuple[Any, ...]) -> None:
    """The oracle's sum of g·x over its sum of g·1."""
    kernel, stride, padding, _, _, _, rate, _ = case
    x, depth, focal = scene(case)
    pool = mb.DepthAwareAvgPool2d(kernel, stride, padding, alpha=3.0)
    one = [torch.ones((), dtype=torch.float64)]
    weight = torch.ones(4, 1, *pair(kernel), dtype=torch.float64)
    settings = (depth, focal, rate, oracle.depth_aware(3.0), one, pair(stride), pair(padding), (1, 1), 4)
    expected = oracle.conv(x, weight, None, *settings) / oracle.conv(torch.ones_like(x), weight, None, *settings)
    y = pool(x, mb.Geometry(depth, focal))
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    for actual, wanted in zip(
        torch.autograd.grad(y.square().sum(), [x, depth]), torch.autograd.grad(expected.square().sum(), [x, depth]),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(actual, torch.nan_to_num(wanted), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("cls", [mb.MalleableConv2d, mb.Conv25d, mb.DepthAwareConv2d])
def test_gradcheck(cls: Any) -> None:
    """The gradients against finite differences, independent of the oracle too."""
    layer = build(cls, CASES[1])
    x, depth, focal = scene(CASES[1])
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def run(*leaves: Tensor) -> Tensor:
        swapped = dict(zip((name for name, _ in layer.named_parameters()), leaves[2:], strict=True))
        return torch.func.functional_call(layer, swapped, (leaves[0], mb.Geometry(leaves[1], focal)))

    known = torch.nan_to_num(depth.detach(), posinf=2.0).clamp(min=1.5).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, known, *parameters), eps=1e-7, atol=1e-5)
