"""What layers do with depth, against the paper's equations written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from timm.layers import ScaledStdConv2dSame
from torch import nn

from helpers.toys import scenes
from malleable.camera import Camera
from malleable.data import Sample, collate, eval_transform
from malleable.figures.inspection import (
    Seeing,
    assigning,
    contributions,
    fields_in_metres,
    forerunners,
    grid_unit,
    kernel_shares,
    neighbours,
    receptive_field,
    seeing_layers,
    telling_channels,
)
from malleable.figures.style import sides
from malleable.geometry import Geometry
from malleable.layers import Conv25d, DepthAwareConv2d, DepthConv2d, MalleableConv2d
from malleable.models import DeepLabV3Plus
from malleable.models.convert import convert

FOCAL = 50.0


def seen(layer: DepthConv2d, rate: int) -> Seeing:
    return Seeing("layer", "res2", rate, layer)


def moved(**options: object) -> MalleableConv2d:
    """A malleable layer that is no longer what it was at the start."""
    layer = MalleableConv2d(2, 3, 3, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        layer.centers.copy_(torch.tensor([-2.4, -1.1, 0.05, 0.9, 2.2]))
        layer.rebalance.copy_(torch.tensor([0.5, -0.3, 0.1]))
    layer.temperature = 0.7
    return layer


def sample_of(depth: torch.Tensor) -> Sample:
    height, width = depth.shape
    camera = Camera(FOCAL, FOCAL, width / 2, height / 2, (height, width))
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    return Sample(image, depth[None], torch.zeros(height, width, dtype=torch.int64), camera)


def malleable_by_hand(d: float, a: list[float], t: float) -> list[float]:
    h = [-math.copysign((d - a[0]) ** 2, d - a[0]), *(-((d - x) ** 2) for x in a[1:-1])]
    h.append(math.copysign((d - a[-1]) ** 2, d - a[-1]))
    e = [math.exp(x / t) for x in h]
    return [x / sum(e) for x in e[1:-1]]


@pytest.mark.parametrize(("depth", "focal", "rate", "dilation"), [(1.0, 260.0, 4, 1), (20.0, 2262.0, 16, 2)])
def test_receptive_fields_in_metres_follow_the_equations(depth: float, focal: float, rate: int, dilation: int) -> None:
    unit = rate * dilation * depth / focal  # Eq. 1
    metres = np.array([-2.3, -1.0, -0.4, 0.0, 0.3, 1.2, 2.6]) * unit
    layer = moved(dilation=dilation)
    a, t = layer.centers.double().tolist(), layer.temperature.item()
    by_hand = [malleable_by_hand(-x / unit, a, t) for x in metres]  # metres behind: d is negative
    np.testing.assert_allclose(receptive_field(seen(layer, rate), depth, focal, metres), np.transpose(by_hand), 1e-9)

    cells = receptive_field(seen(Conv25d(1, 1, 3, dilation=dilation), rate), depth, focal, metres)
    expected = [[k - 2.5 <= -x / unit < k - 1.5 for x in metres] for k in (1, 2, 3)]
    np.testing.assert_array_equal(cells, expected)

    fading = receptive_field(seen(DepthAwareConv2d(1, 1, 3, dilation=dilation), rate), depth, focal, metres)
    np.testing.assert_allclose(fading[0], np.exp(-8.3 * np.abs(metres)), 1e-9)
    assert grid_unit(depth, focal, rate, layer.dilation) == pytest.approx(unit)


def test_no_neighbour_is_behind_the_camera() -> None:
    g = receptive_field(seen(moved(), 4), 1.0, FOCAL, np.array([-1.5, -0.5]))
    assert np.isnan(g[:, 0]).all()
    assert not np.isnan(g[:, 1]).any()


def test_methods_of_a_stage_are_seen_over_the_same_metres() -> None:
    layers = [seen(moved(), 4)]
    fields = fields_in_metres({**forerunners(layers), "malleable": layers}, 1.0, FOCAL)
    metres = [field["res2"].metres for field in fields.values()]
    assert all(np.array_equal(metres[0], other) for other in metres)
    assert [len(field["res2"].g) for field in fields.values()] == [1, 3, 3]


def test_assigning_functions_follow_the_equations() -> None:
    d, a, t = np.linspace(-3, 3, 7), [-2.0, -1.0, 0.0, 1.0, 2.0], 0.6
    state = assigning(d, a, t)
    h, g = state.h, state.g
    np.testing.assert_allclose(g.T, [malleable_by_hand(x, a, t) for x in d])
    assert (h.shape, h[0, 0], h[4, 0]) == ((5, 7), pytest.approx(1 / t), pytest.approx(-25 / t))


def test_a_nearer_neighbour_goes_to_the_kernel_in_front_and_a_farther_one_behind() -> None:
    depth = torch.full((9, 9), 2.0)
    depth[:, 5:] -= 2.0 / FOCAL  # one grid cell nearer than column 4
    depth[:, :4] += 2.0 / FOCAL
    seeing = seen(MalleableConv2d(1, 1, 3, padding=1), 1)
    found = neighbours(seeing, sample_of(depth), (4, 4))
    taker = [sides(seeing.centers)[k] for k in found.g.argmax(0)]
    assert taker == 3 * ["behind", "same depth", "in front"]
    assert found.taps[:, 0].tolist() == 3 * [3, 4, 5]


@pytest.mark.parametrize("invalid", ["same", "uniform", "ignore"])
def test_shares_are_a_count_over_pixels_and_taps(invalid: str) -> None:
    torch.manual_seed(1)
    layer = moved(stride=2, padding=1, invalid=invalid)
    depth = 1 + 0.1 * torch.rand(11, 14)
    depth[3, 4] = depth[8, 8] = 0
    rate, (height, width) = 2, (6, 7)
    a, t = layer.centers.double().tolist(), layer.temperature.item()
    counts = np.zeros(3)
    for i, j, u, v in product(range(0, height, 2), range(0, width, 2), (-1, 0, 1), (-1, 0, 1)):
        if not (0 <= i + u < height and 0 <= j + v < width):
            continue
        center, tap = depth[rate * i, rate * j].item(), depth[rate * (i + u), rate * (j + v)].item()
        if center and tap:
            counts += malleable_by_hand((center - tap) * FOCAL / (rate * center), a, t)
        elif invalid == "same":
            counts += malleable_by_hand(0, a, t)
        elif invalid == "uniform":
            counts += 1 / 5
    scales = np.exp([0.5, -0.3, 0.1])
    sample = sample_of(depth)
    ((before, after),) = kernel_shares([seen(layer, rate)], [sample, sample])
    np.testing.assert_allclose(before, counts / counts.sum(), 1e-5)
    np.testing.assert_allclose(after, scales * counts / (scales * counts).sum(), 1e-5)


@pytest.mark.parametrize("original", [partial(nn.Conv2d, padding=1), ScaledStdConv2dSame])
@pytest.mark.parametrize("conv", ["malleable", "conv25d", "depth_aware"])
def test_what_the_kernels_add_sums_to_the_output(conv: str, original: Callable[..., nn.Conv2d]) -> None:
    net = convert(nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), original(4, 6, 3, groups=2)), conv, where=["1"])
    (layer,) = net.layers().values()
    sample = scenes()[0]
    outputs: list[torch.Tensor] = []
    layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    parts = contributions(net.eval(), layer, sample)
    batch = collate([eval_transform()(sample)])
    net(batch.image, depth=batch.depth, focal=batch.focal)
    assert layer.bias is not None
    expected = outputs[-1][0] - layer.bias.view(-1, 1, 1)
    assert parts.shape == (layer.kernels, *expected.shape)
    np.testing.assert_allclose(parts.sum(0), expected.detach().numpy(), atol=1e-5)
    assert len(layer._forward_hooks) == 1  # ours


def test_channels_to_show_vary_and_differ() -> None:
    wave, other = np.sin(np.arange(60.0)).reshape(1, 6, 10), np.cos(np.arange(60.0)).reshape(1, 6, 10)
    faint = 0.001 * np.random.default_rng(0).standard_normal((20, 6, 10))
    maps = np.concatenate([faint, 3 * wave + 7, 2 * other, -2 * wave])
    assert telling_channels(maps) == [20, 21]
    assert telling_channels(maps[:1]) == [0]


def test_neighbours_lie_a_rate_and_a_dilation_apart() -> None:
    seeing = seen(moved(stride=2, padding=2, dilation=2), 4)
    found = neighbours(seeing, sample_of(torch.ones(64, 96)), (41, 26))
    assert found.pixel == (40, 24)
    assert found.taps[[0, 4, 8]].tolist() == [[32, 16], [40, 24], [48, 32]]
    corner = neighbours(seeing, sample_of(torch.ones(64, 96)), (0, 0))
    assert corner.inside.tolist() == [False] * 4 + [True, True, False, True, True]


def test_by_default_a_pixel_is_shown_whose_neighbours_differ() -> None:
    depth = torch.full((16, 16), 2.0)
    depth[:, 9:] -= 2.0 / FOCAL
    found = neighbours(seen(MalleableConv2d(1, 1, 3, padding=1), 1), sample_of(depth))
    assert found.pixel[0] in (8, 9)


def test_by_default_the_whole_window_lies_on_the_map_and_has_depth() -> None:
    depth = torch.full((16, 16), 2.0)
    depth[:, :4] -= 0.4 / FOCAL  # a faint edge
    depth[7:10, 10:13] = 0
    depth[8, 11] = 2.0 - 2.0 / FOCAL  # strong, but seen only together with unknown depth
    found = neighbours(seen(MalleableConv2d(1, 1, 5, padding=2), 1), sample_of(depth))
    assert found.inside.all()
    assert all(depth[y, x] > 0 for x, y in found.taps)


@pytest.mark.parametrize("size", [3, 16])
def test_without_depth_the_window_lies_on_the_map_if_it_can(size: int) -> None:
    found = neighbours(seen(MalleableConv2d(1, 1, 5, padding=2), 1), sample_of(torch.zeros(size, size)))
    assert found.inside.all() == (size == 16)


def test_layers_are_named_by_stage_whatever_order_they_were_asked_for_in() -> None:
    net = DeepLabV3Plus("resnet10t", 3, kernels=1, stages=(4, 2))
    found = seeing_layers(net)
    assert [(seeing.stage, seeing.name, seeing.rate) for seeing in found] == [
        ("res2", "layer1.0.conv1", 4),
        ("res4", "layer3.0.conv1", 8),
    ]
    assert found[0].layer is net.backbone.layers()["layer1.0.conv1"]
    assert seeing_layers(DeepLabV3Plus("resnet10t", 3, conv=None)) == []


def test_neighbours_lie_where_a_layer_that_pads_by_itself_reads_them() -> None:
    layer = MalleableConv2d(1, 1, 3, stride=2)
    layer.pads_same = True
    found = neighbours(seen(layer, 1), sample_of(torch.ones(9, 9)), (4, 4))
    assert found.pixel == (4, 4)
    assert found.taps.min() == 3
    assert found.taps.max() == 5


def test_unknown_depth_is_filled_as_the_network_does() -> None:
    depth = torch.linspace(1, 2, 16).repeat(16, 1)
    holed = depth.clone()
    holed[4:12, 4:12] = 0
    layer = MalleableConv2d(1, 1, 3, padding=1)
    as_it_is, filled = (
        neighbours(Seeing("layer", "res2", 1, layer, fill), sample_of(holed), (8, 8)).g for fill in (False, True)
    )
    assert not np.allclose(filled, as_it_is, atol=1e-3)
    geometry = Geometry(holed[None, None], FOCAL).filled()
    whole = sample_of(geometry.depth[0, 0])
    assert np.allclose(filled, neighbours(seen(layer, 1), whole, (8, 8)).g)


def test_depth_is_smoothed_as_the_network_does() -> None:
    depth = 1 + torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    layer = MalleableConv2d(1, 1, 3, padding=1)
    smoothed = neighbours(Seeing("layer", "res2", 1, layer, smooth_depth=2), sample_of(depth), (8, 8)).g
    already = sample_of(Geometry(depth[None, None], FOCAL).smoothed(2).depth[0, 0])
    assert np.allclose(smoothed, neighbours(seen(layer, 1), already, (8, 8)).g)
    assert not np.allclose(smoothed, neighbours(seen(layer, 1), sample_of(depth), (8, 8)).g, atol=1e-3)
