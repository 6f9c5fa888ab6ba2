"""Half precision against float64. Tolerances are relative to the largest value of each tensor.

bfloat16 carries 8 bits and float16 11: a sum of a hundred rounded products is right to about 1 % and 0.2 % of scale.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import malleable as mb

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}


def run(layer: Any, x: Tensor, depth: Tensor, direction: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    y = layer(x, mb.Geometry(depth, 40.0))
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return [y, *torch.autograd.grad(y, [x, *parameters], direction.to(y.dtype))]


@pytest.fixture
def scene() -> tuple[mb.MalleableConv2d, Tensor, Tensor, Tensor]:
    layer = mb.MalleableConv2d(12, 16, 3, padding=1, dtype=torch.float64)
    depth = 2 + 0.1 * torch.randn(2, 1, 24, 32, dtype=torch.float64)
    return (
        layer,
        torch.randn(2, 12, 12, 16, dtype=torch.float64),
        depth,
        torch.randn(2, 16, 12, 16, dtype=torch.float64),
    )


def assert_near(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).abs().max() <= tolerance * e.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layers_in_lower_precision(dtype: torch.dtype, scene: tuple[Any, ...]) -> None:
    layer, x, depth, direction = scene
    # Everything is rounded once, so that both runs start from the same numbers.
    layer.to(dtype).double()
    x, direction = x.to(dtype).double(), direction.to(dtype).double()
    depth = depth.float().double()
    expected = run(layer, x, depth, direction)
    low = run(layer.to(dtype), x.to(dtype), depth.float(), direction)
    assert low[0].dtype == dtype
    assert_near(low, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, scene: tuple[Any, ...]) -> None:
    layer, x, depth, direction = scene
    expected = run(layer, x, depth, direction)
    layer.float()
    with torch.autocast("cpu", dtype):
        low = run(layer, x.float(), depth.float(), direction)
    assert low[0].dtype == dtype
    assert all(g.dtype == torch.float32 for g in low[1:])
    assert_near(low, expected, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_assignment_is_never_computed_in_half_precision(dtype: torch.dtype, scene: tuple[Any, ...]) -> None:
    layer, _, depth, _ = scene
    layer.float()
    expected = layer.assign(mb.Geometry(depth.float(), 40.0), (12, 16))
    with torch.autocast("cpu", dtype):
        assign = layer.assign(mb.Geometry(depth.float(), 40.0), (12, 16))
    assert assign.dtype == torch.float32
    assert torch.equal(assign, expected)


def test_double_input_gets_a_double_assignment(scene: tuple[Any, ...]) -> None:
    layer, x, depth, _ = scene
    exact = layer(x, mb.Geometry(depth, 40.0))
    rounded = layer(x, mb.Geometry(depth.float(), 40.0))
    assert exact.dtype == rounded.dtype == torch.float64
    torch.testing.assert_close(rounded, exact, rtol=1e-4, atol=1e-4)


def test_autocast_leaves_float64_alone(scene: tuple[Any, ...]) -> None:
    layer, x, depth, _ = scene
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x, mb.Geometry(depth, 40.0)).dtype == torch.float64
