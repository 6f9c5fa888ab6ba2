from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import malleable as mb
from helpers.networks import Tiny, lively, scene
from helpers.onnx import as_onnx
from malleable.models.cost import measure
from malleable.ops.fill import fill

HOLES = [0.0, -1.0, float("nan"), float("inf")]


def plane(height: int, width: int) -> torch.Tensor:
    """Depth (1, 1, height, width) of a slanted wall: its inverse is linear in the image."""
    rows, columns = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    return 1 / (0.4 + 0.2 * columns + 0.1 * rows)[None, None]


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (33, 47), (64, 96)])
def test_what_is_known_stays_and_all_else_is_between(size: tuple[int, int]) -> None:
    depth = 1 + torch.rand(2, 1, *size, generator=torch.Generator().manual_seed(0))
    known = torch.rand(2, 1, *size, generator=torch.Generator().manual_seed(1)) < 0.3
    known[..., 0, 0] = True
    filled = fill(torch.where(known, depth, 0.0), known)
    assert torch.equal(filled[known], depth[known])
    for image, given_depth, where in zip(filled, depth, known, strict=True):
        assert image.min() >= given_depth[where].min() - 1e-5
        assert image.max() <= given_depth[where].max() + 1e-5


def test_a_hole_in_a_wall_is_the_wall() -> None:
    depth = plane(64, 96)
    known = torch.ones_like(depth, dtype=torch.bool)
    known[..., 24:36, 40:56] = False
    filled = fill(torch.where(known, depth, 0.0), known)
    assert (filled / depth - 1).abs().max() < 0.02
    flat = torch.full_like(depth, 2.0)
    assert torch.allclose(fill(torch.where(known, flat, 0.0), known), flat, rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_a_factor_of_depth_is_a_factor_of_the_result(factor: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    depth, known = 1 + torch.rand(1, 1, 20, 31, generator=random), torch.rand(1, 1, 20, 31, generator=random) < 0.2
    expected = fill(depth, known)
    assert torch.allclose(fill(depth * factor, known), expected * factor, rtol=1e-5)
    power = 2.0 ** round(torch.tensor(factor).log2().item())
    assert torch.equal(fill(depth * power, known), expected * power)


@pytest.mark.parametrize("hole", HOLES)
def test_geometry_fills_whatever_marks_a_hole(hole: float) -> None:
    depth = torch.full((2, 1, 16, 16), 3.0)
    depth[0, :, 4:8, 4:8] = hole
    depth[1] = hole
    geometry = mb.Geometry(depth, 50.0).filled()
    assert torch.allclose(geometry.depth[0], torch.tensor(3.0))
    assert torch.equal(geometry.depth_at((16, 16))[0][1], torch.zeros(1, 16, 16))  # nothing to fill it from


@pytest.mark.parametrize("hole", HOLES)
def test_gradients_go_to_the_pixels_that_are_known(hole: float) -> None:
    depth = (1 + torch.rand(1, 1, 9, 12)).double()
    depth[..., 2:5, 3:9] = hole
    depth.requires_grad_()
    mb.Geometry(depth, 50.0).filled().depth.sum().backward()
    assert depth.grad is not None
    assert depth.grad.isfinite().all()
    assert torch.equal(depth.grad == 0, ~(depth.detach().nan_to_num(0, 0, 0) > 0))
    assert depth.grad.sum() > 108  # 90 pixels for themselves, and for 18 that are unknown


@pytest.mark.parametrize("depth_input", [None, "relative"])
def test_a_network_fills_before_anything_sees_depth(depth_input: str | None) -> None:
    model, (rgb, depth) = lively(Tiny()), scene()
    depth[..., 10:20, 10:30] = 0
    options = {"depth_input": depth_input}
    net, without = (mb.convert(model, **options, fill_depth=filled) for filled in (True, False))  # type: ignore[arg-type]
    for each in (net, without):
        if each.depth_input is not None:
            nn.init.ones_(each.depth_input.conv.weight)
    filled = mb.Geometry(depth, 60.0).filled().depth
    assert torch.equal(net(rgb, depth=depth, focal=60.0), without(rgb, depth=filled, focal=60.0))
    assert not torch.equal(net(rgb, depth=depth, focal=60.0), without(rgb, depth=depth, focal=60.0))


def test_a_second_encoder_is_filled_for_too() -> None:
    torch.manual_seed(0)
    net = mb.deeplabv3plus(
        "resnet10t", 5, None, pretrained=False, width=16, skip=8, depth_encoder="metric", fill_depth=True
    )
    rgb, depth = torch.rand(1, 3, 64, 64), 1 + torch.rand(1, 1, 64, 64)
    depth[..., 10:20, 10:30] = 0
    filled = mb.Geometry(depth, 60.0).filled().depth
    net.eval()
    assert torch.equal(net(rgb, depth=depth), net(rgb, depth=filled))
    assert net.settings["fill_depth"] is True


def test_its_cost_is_that_of_the_network() -> None:
    filled, plain = (
        mb.deeplabv3plus(
            "resnet10t", 5, pretrained=False, width=16, skip=8, depth_input="relative", fill_depth=fill_depth
        )
        for fill_depth in (True, False)
    )
    assert measure(filled, (64, 96)) == measure(plain, (64, 96))


def test_compiled_it_is_the_same() -> None:
    torch._dynamo.reset()
    model, (rgb, depth) = lively(Tiny()).eval(), scene()
    depth[..., 10:20, 10:30] = 0
    net = mb.convert(model, fill_depth=True)
    with torch.no_grad():
        expected = net(rgb, depth=depth, focal=60.0)
        output = torch.compile(net, backend="aot_eager", fullgraph=True)(rgb, depth=depth, focal=60.0)
    assert torch.allclose(output, expected, atol=1e-5)


def test_onnx_at_sizes_it_was_not_exported_with(tmp_path: Path) -> None:
    def filled(depth: torch.Tensor) -> torch.Tensor:
        return fill(depth, depth > 0)

    run = as_onnx(filled, 1 + torch.rand(1, 1, 64, 96), tmp_path)
    for height, width in [(64, 96), (33, 47), (300, 71)]:
        depth = 1 + torch.rand(1, 1, height, width)
        depth[torch.rand(depth.shape) < 0.7] = 0
        torch.testing.assert_close(run(depth), filled(depth), rtol=1e-5, atol=1e-5)
