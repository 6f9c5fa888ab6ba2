"""Direct calls, past PyTorch's dispatcher, against the way they are a short cut of."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

import malleable as mb
from malleable.ops.direct import is_direct
from malleable.ops.engines.native import build
from malleable.ops.window import Window


@pytest.fixture
def needs_library() -> None:
    if isinstance(build.library(), str):
        pytest.skip(str(build.library()))


@pytest.fixture
def the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nothing is called directly."""
    for module in ("depth_conv2d", "malleable_conv2d", "scaled_assign", "differences"):
        monkeypatch.setattr(import_module(f"malleable.ops.{module}"), "is_direct", lambda *tensors: False)


def results(layer: mb.MalleableConv2d, x: Tensor, depth: Tensor) -> list[Tensor]:
    """Without gradients, then with them: output, and the gradients of x and every parameter."""
    with torch.no_grad():
        first = layer(x, mb.Geometry(depth, 60.0))
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    y = layer(leaves[0], mb.Geometry(depth, 60.0))
    return [first, y, *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_a_layer_is_the_same_either_way(groups: int, temperature: float, request: pytest.FixtureRequest) -> None:
    layer = mb.MalleableConv2d(6, 6, 3, 2, 1, groups=groups, temperature=temperature)
    with torch.no_grad():
        layer.rebalance.copy_(torch.tensor([0.3, -1.0, 0.5]))
        layer.gain.fill_(1.7)
    x, depth = torch.randn(2, 6, 9, 10), 2 + 0.3 * torch.rand(2, 1, 18, 20)
    depth[:, :, 3:6, 2:9] = 0
    direct = results(layer, x, depth)
    request.getfixturevalue("the_long_way")
    for a, e in zip(direct, results(layer, x, depth), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [Window.of(3, 1, 1), Window.of((4, 5), (2, 3), 2, (2, 1)), Window.of(1)], ids=str)
@pytest.mark.parametrize("size", [(23, 30), (12, 15)])
@pytest.mark.usefixtures("needs_library")
def test_differences_are_the_same_to_the_last_bit(
    window: Window, size: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    depth = 1 + torch.rand(2, 1, 23, 30)
    depth[0, 0, 4:9, 5:8] = torch.tensor([0.0, torch.nan, -1.0])
    depth[1, 0, 0] = torch.inf
    focal = torch.tensor([50.0, 70.0])
    direct = [
        *mb.Geometry(depth, focal).relative_depth(window, size),
        *mb.Geometry(depth, focal).depth_difference(window, size),
    ]
    request.getfixturevalue("the_long_way")
    expected = [
        *mb.Geometry(depth, focal).relative_depth(window, size),
        *mb.Geometry(depth, focal).depth_difference(window, size),
    ]
    assert all(torch.equal(a, e) for a, e in zip(direct, expected, strict=True))


def test_whoever_watches_the_operators_sees_them() -> None:
    x = torch.randn(3)
    assert is_direct(x, None)
    assert not is_direct(x.to("meta"))
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not is_direct(x)
    with torch.autograd.forward_ad.dual_level():
        assert not is_direct(x)
    torch.func.vmap(lambda t: [_assert_not_direct(t), t][1])(x)


def _assert_not_direct(t: Tensor) -> None:
    assert not is_direct(t)


def test_a_sign_that_pytorch_put_off_is_minded() -> None:
    imaginary = torch.randn(1, 2, 8, 8, dtype=torch.complex64).conj().imag
    negative = -1 - torch.rand(1, 1, 8, 8)
    depth = torch.complex(negative, negative).conj().imag
    assert imaginary.is_neg()
    assert depth.is_neg()
    layer = mb.MalleableConv2d(2, 3, 3, padding=1)
    expected = layer(imaginary.resolve_neg(), mb.Geometry(depth.resolve_neg(), 50.0))
    torch.testing.assert_close(layer(imaginary, mb.Geometry(depth, 50.0)), expected)
