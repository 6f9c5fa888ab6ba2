"""What the explorer shows of a pixel, against the layers themselves on the whole map."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.toys import scenes
from malleable.data import Sample
from malleable.explorer.explorer import layers_of
from malleable.explorer.layer import MOST_KERNELS, Layer, field, look
from malleable.figures.inspection import Seeing
from malleable.geometry import Geometry
from malleable.inference.load import Trained
from malleable.layers import Conv25d, DepthAwareConv2d, DepthConv2d, MalleableConv2d
from malleable.models.convert import convert

SAMPLE = scenes()[1]  # 24 × 32, with holes in its depth
MOVED = Layer(centers=(-2.3, -1.2, 0.1, 0.8, 1.9), temperature=0.6)
LAYERS = [Layer(), MOVED, Layer("conv25d", kernels=2), Layer("depth_aware", kernels=1, alpha=3.0)]


def whole(layer: Layer) -> DepthConv2d:
    """The layer as a network has it, made by hand."""
    window = {"padding": layer.taps // 2 * layer.dilation, "dilation": layer.dilation, "invalid": layer.invalid}
    if layer.conv == "depth_aware":
        return DepthAwareConv2d(1, 1, layer.taps, **window, alpha=layer.alpha)  # type: ignore[arg-type]
    if layer.conv == "conv25d":
        return Conv25d(1, 1, layer.taps, **window, kernels=layer.kernels)  # type: ignore[arg-type]
    own = {"centers": layer.centers or None, "temperature": layer.temperature, "kernels": layer.kernels}
    return MalleableConv2d(1, 1, layer.taps, **window, **own)  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.conv)
@given(
    st.sampled_from([1, 2, 4]), st.integers(1, 3), st.sampled_from([3, 5]),
    st.sampled_from(["same", "uniform", "ignore"]), st.integers(0, 31), st.integers(0, 23),
)  # fmt: skip
def test_shares_are_those_of_the_layer_on_the_whole_map(
    layer: Layer, rate: int, dilation: int, taps: int, invalid: str, x: int, y: int
) -> None:
    layer = replace(layer, rate=rate, dilation=dilation, taps=taps, invalid=invalid)
    seen = look(layer, SAMPLE, (x, y))
    size = (24 // rate, 32 // rate)
    geometry = Geometry(SAMPLE.depth.as_subclass(Tensor)[None], SAMPLE.camera.focal)
    with torch.no_grad():
        assign = whole(layer).assign(geometry, size)[0]  # (K, taps, H, W), times the scales
    column, row = (at // rate for at in seen.pixel)
    scale = 1 / layer.kernels if layer.conv == "malleable" else 1.0
    expected = (assign[:, :, row, column] / scale).numpy()
    np.testing.assert_allclose(seen.g[:, seen.inside], expected[:, seen.inside], rtol=1e-4, atol=1e-5)
    assert (np.abs(np.subtract(seen.pixel, (x, y))) < rate).all()


def test_taps_carry_their_own_depth() -> None:
    seen = look(replace(MOVED, rate=2, dilation=2), SAMPLE, (30, 2))
    for (x, y), inside, depth in zip(seen.taps, seen.inside, seen.depth, strict=True):
        assert inside == (0 <= x < 32 and 0 <= y < 24)
        assert depth == (SAMPLE.depth[0, y, x] if inside else 0)


def test_a_tap_of_unit_difference_has_a_difference_of_one() -> None:
    depth = torch.full((24, 32), 2.0)
    layer = Layer(taps=3, dilation=2, rate=4)
    unit = look(layer, with_depth(depth), (16, 12)).unit
    assert unit == pytest.approx(4 * 2 * 2.0 / SAMPLE.camera.focal)
    depth[:, 24] += unit
    d = look(layer, with_depth(depth), (16, 12)).d.reshape(3, 3)
    np.testing.assert_allclose(d[:, 2], -1, rtol=1e-5)
    np.testing.assert_array_equal(d[:, :2], 0)


def test_without_depth_there_is_no_unit_and_all_count_as_told() -> None:
    blind = with_depth(torch.zeros(24, 32))
    seen = look(replace(Layer(), invalid="uniform"), blind, (16, 12))
    assert seen.unit is None
    assert not seen.known.any()
    np.testing.assert_allclose(seen.g, 1 / 5)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.conv)
def test_the_field_is_the_layers(layer: Layer) -> None:
    d, g = field(layer)
    expected = whole(layer).receptive_field(torch.from_numpy(d))  # type: ignore[operator]
    np.testing.assert_array_equal(g, expected.detach().numpy())
    assert g[:, [0, -1]].max() < 0.05 < g.max()


@pytest.mark.parametrize("conv", ["malleable", "conv25d", "depth_aware"])
def test_layers_of_a_network_are_described_as_they_are(conv: str) -> None:
    net = convert(nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 6, 5, padding=4, dilation=2)), conv, where=["1"])
    layer: DepthConv2d = net.layers()["1"]
    if isinstance(layer, MalleableConv2d):
        with torch.no_grad():
            layer.centers += 0.1
            layer.rebalance[0] = 1
        layer.temperature = 0.7
    net.settings = {}  # type: ignore[assignment]
    ((name, described),) = layers_of({"net": Trained(net, (), ())}).items()  # type: ignore[arg-type]
    assert name == "net: 1"
    assert (described.conv, described.taps, described.dilation, described.rate) == (conv, 5, 2, 2)
    d = torch.linspace(-3, 3, 13)
    ours, theirs = (part.receptive_field(d).detach() for part in (described.module(), layer))  # type: ignore[operator]
    torch.testing.assert_close(ours, theirs)
    if isinstance(layer, MalleableConv2d):
        assert described.scales == tuple(layer.scales.tolist())


def test_a_network_that_fills_depth_is_shown_with_filled_depth() -> None:
    layer = MalleableConv2d(1, 1, 3, padding=1)
    described = Layer.of(Seeing("conv1", "res2", 1, layer, fill_depth=True))
    (y, x) = (SAMPLE.depth.as_subclass(Tensor)[0] == 0).nonzero()[0].tolist()
    seen = look(described, SAMPLE, (x, y))
    geometry = Geometry(SAMPLE.depth.as_subclass(Tensor)[None], SAMPLE.camera.focal).filled()
    assert seen.known[seen.inside].all()
    assert seen.depth[4] == geometry.depth[0, 0, y, x]
    assert look(replace(described, fill_depth=False), SAMPLE, (x, y)).depth[4] == 0


def test_a_network_that_smooths_depth_is_shown_with_smoothed_depth() -> None:
    described = Layer.of(Seeing("conv1", "res2", 1, MalleableConv2d(1, 1, 3, padding=1), smooth_depth=2))
    geometry = Geometry(SAMPLE.depth.as_subclass(Tensor)[None], SAMPLE.camera.focal)
    smoothed, given = geometry.smoothed(2).depth[0, 0], geometry.depth[0, 0]
    (y, x) = ((smoothed - given).abs() > 0.001).nonzero()[0].tolist()
    assert look(described, SAMPLE, (x, y)).depth[4] == smoothed[y, x]
    assert look(replace(described, smooth_depth=0), SAMPLE, (x, y)).depth[4] == given[y, x]


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (MalleableConv2d(1, 1, (3, 5)), "only square odd ones"),
        (MalleableConv2d(1, 1, 3, kernels=MOST_KERNELS + 1), f"at most {MOST_KERNELS}"),
    ],
)
def test_what_cannot_be_shown_is_named(layer: DepthConv2d, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Layer.of(Seeing("conv1", "res2", 4, layer))


def with_depth(depth: Tensor) -> Sample:
    return replace(SAMPLE, depth=depth[None])
