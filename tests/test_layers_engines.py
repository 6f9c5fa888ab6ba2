"""Every layer trains on every CPU engine, in every dtype: output and gradients against ordinary autograd in float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import malleable as mb
from malleable.ops.engines.native import build

# Relative to the largest value of each tensor.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

LAYERS: dict[str, Any] = {
    "malleable": lambda: mb.MalleableConv2d(6, 8, 3, padding=1),
    "malleable grouped": lambda: mb.MalleableConv2d(6, 8, 3, 2, 1, groups=2, invalid="uniform"),
    "conv25d": lambda: mb.Conv25d(6, 8, 3, padding=2, dilation=2),
    "depth-aware": lambda: mb.DepthAwareConv2d(6, 8, 3, padding=1),
    "pooling": lambda: mb.DepthAwareAvgPool2d(3, 2, 1),
}


def run(layer: Any, x: Tensor, depth: Tensor, directions: Tensor) -> list[Tensor]:
    """Output, then the gradients of x, of the depth where it has one, and of every parameter."""
    leaves = [x.clone().requires_grad_(), depth.clone().requires_grad_(), *layer.parameters()]
    y = layer(leaves[0], mb.Geometry(leaves[1], 40.0))
    gradients = torch.autograd.grad(y, leaves, directions[: y.numel()].view_as(y).to(y.dtype), materialize_grads=True)
    return [y, *gradients]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("engine", ["plain", "blocks", "native", "auto"])
@pytest.mark.parametrize("kind", LAYERS)
def test_trains(kind: str, engine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLEABLE_ENGINE", engine)
    layer = LAYERS[kind]().to(dtype)
    x = torch.randn(2, 6, 9, 10).to(dtype)
    depth = 2 + 0.1 * torch.randn(2, 1, 18, 20)
    depth[:, :, 3:6, 2:9] = 0
    directions = torch.randn(2 * 8 * 9 * 10).to(dtype)
    groups = layer.groups if hasattr(layer, "groups") else 6
    impossible = {
        "native": dtype == torch.float64 or isinstance(build.library(), str),
        "blocks": dtype in (torch.bfloat16, torch.float16) or groups > 1,
    }
    if impossible.get(engine):
        with pytest.raises(RuntimeError, match=f"MALLEABLE_ENGINE={engine} cannot run this call"):
            run(layer, x, depth, directions)
        return
    actual = run(layer, x, depth, directions)
    with mock.patch("torch.compiler.is_exporting", return_value=True):  # no operator, so autograd does it all
        expected = run(layer.double(), x.double(), depth, directions.double())
    assert actual[0].dtype == dtype
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).abs().max() <= TOLERANCE[dtype] * e.abs().max()
