from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import median_filter
from torch import nn

import malleable as mb
from helpers.networks import Tiny, lively, scene
from helpers.onnx import as_onnx
from malleable.figures.inspection import seeing_layers
from malleable.models.convert import Converted
from malleable.models.cost import measure
from malleable.models.depth_input import DepthEncoder
from malleable.models.foreign import DEEPLAB, from_settings
from malleable.ops.smooth import smooth
from malleable.runs.config import ModelConfig, build_network

UNET = {"encoder_name": "resnet18", "decoder_channels": [16, 8, 8, 8, 8]}
UNKNOWN = [0.0, -1.0, float("nan"), float("inf")]


def uneven(*size: int) -> torch.Tensor:
    return 1 + torch.rand(2, 1, *size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 1), (2, 2), (33, 47)])
def test_it_is_the_median_of_scipy(size: tuple[int, int]) -> None:
    depth = uneven(*size)
    expected = [median_filter(image, 3, mode="nearest") for image in depth[:, 0].numpy()]
    assert np.array_equal(smooth(depth)[:, 0].numpy(), np.stack(expected))


def test_noise_shrinks_and_an_edge_stays_where_it_is() -> None:
    true = torch.full((1, 1, 40, 60), 2.0)
    true[..., 25:] = 4
    assert torch.equal(smooth(true), true)
    noisy = true * (1 + 0.02 * torch.randn(true.shape, generator=torch.Generator().manual_seed(0)))
    before, once, twice = ((each / true - 1).std() for each in (noisy, smooth(noisy), smooth(smooth(noisy))))
    assert twice < 0.8 * once < 0.4 * before


def test_passes_follow_each_other_and_none_is_none() -> None:
    geometry = mb.Geometry(uneven(12, 17), 50.0)
    assert torch.equal(geometry.smoothed(2).depth, smooth(smooth(geometry.depth)))
    assert torch.equal(geometry.smoothed(2).depth, geometry.smoothed().smoothed().depth)
    assert torch.equal(geometry.smoothed(np.int64(2)).depth, geometry.smoothed(2).depth)  # type: ignore[arg-type]
    assert geometry.prepared() is geometry


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_unknown_depth_stays_unknown_and_its_neighbours_do_not_suffer(unknown: float) -> None:
    depth = torch.full((2, 1, 16, 16), 3.0)
    depth[0, :, 4:8, 4:8] = unknown
    depth[1] = unknown
    scattered = torch.rand(16, 16, generator=torch.Generator().manual_seed(1)) < 0.7
    depth[0, 0, scattered] = unknown
    smoothed = mb.Geometry(depth, 50.0).smoothed(3).depth_at((16, 16))[0]
    torch.testing.assert_close(smoothed[0, 0], torch.where(depth[0, 0] == 3, 3.0, 0.0))
    assert torch.equal(smoothed[1], torch.zeros(1, 16, 16))


def test_filled_and_smoothed_at_once_is_one_after_the_other() -> None:
    depth = uneven(20, 31)
    depth[..., 5:9, 10:20] = 0
    geometry = mb.Geometry(depth, 50.0)
    assert torch.equal(geometry.prepared(True, 2).depth, geometry.filled().smoothed(2).depth)


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_gradients_are_finite_and_complete(unknown: float) -> None:
    depth = uneven(9, 12).double()
    depth[..., 2:5, 3:9] = unknown
    depth.requires_grad_()
    mb.Geometry(depth, 50.0).prepared(True, 1).depth.sum().backward()
    assert depth.grad is not None
    assert depth.grad.isfinite().all()
    assert torch.equal(depth.grad[..., 2:5, 3:9], torch.zeros(2, 1, 3, 6, dtype=torch.float64))
    flat = torch.full((1, 1, 4, 4), 2.0, dtype=torch.float64, requires_grad=True)
    smooth(flat).sum().backward()
    assert flat.grad is not None
    assert flat.grad.sum() == pytest.approx(16)  # ties are shared


@pytest.mark.parametrize("options", [{}, {"depth_input": "relative"}, {"depth_input": "relative", "fill_depth": True}])
def test_a_network_smooths_before_anything_sees_depth(options: dict[str, Any]) -> None:
    model, (rgb, depth) = lively(Tiny()), scene()
    depth[..., 10:20, 10:30] = 0
    net, without = (mb.convert(model, **options, smooth_depth=passes) for passes in (2, 0))
    for each in (net, without):
        if each.depth_input is not None:
            nn.init.ones_(each.depth_input.conv.weight)
    smoothed = mb.Geometry(depth, 60.0).prepared(options.get("fill_depth", False), 2).depth
    assert torch.equal(net(rgb, depth=depth, focal=60.0), without(rgb, depth=smoothed, focal=60.0))
    assert not torch.equal(net(rgb, depth=depth, focal=60.0), without(rgb, depth=depth, focal=60.0))


def test_deeplab_smooths_for_backbone_and_second_encoder() -> None:
    torch.manual_seed(0)
    small: dict[str, Any] = {"pretrained": False, "width": 16, "skip": 8, "depth_encoder": "metric"}
    net = lively(mb.deeplabv3plus("resnet10t", 5, smooth_depth=np.int64(1), **small))  # type: ignore[arg-type]
    without = mb.deeplabv3plus("resnet10t", 5, **small).eval()
    without.load_state_dict(net.state_dict())
    rgb, depth = torch.rand(1, 3, 64, 64), 1 + torch.rand(1, 1, 64, 64)
    expected = without(rgb, depth=smooth(depth), focal=60.0)
    assert torch.equal(net(rgb, depth=depth, focal=60.0), expected)
    for part in (net.backbone, net.depth_encoder):
        part.smooth_depth = 0
        assert not torch.equal(net(rgb, depth=depth, focal=60.0), expected)
        part.smooth_depth = 1
    assert json.loads(json.dumps(net.settings))["smooth_depth"] == 1
    assert measure(net, (64, 96)) == measure(without, (64, 96))


@pytest.mark.parametrize(
    "own", [{"network": DEEPLAB, "backbone": "resnet10t"}, {"network": "smp:Unet", "options": UNET}]
)
def test_settings_reach_the_network_and_come_back(own: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = build_network(ModelConfig(**own, pretrained=False, smooth_depth=2), 5)
    again = from_settings(json.loads(json.dumps(net.settings)))
    for each in (net, again):
        assert [part.smooth_depth for part in each.modules() if isinstance(part, Converted)] == [2]
        assert [seeing.smooth_depth for seeing in seeing_layers(each)] == [2] * 4


def test_encoders_pickled_before_there_was_smoothing_are_as_they_were() -> None:
    encoder = DepthEncoder("metric", nn.Identity())
    del encoder.smooth_depth
    assert encoder.smooth_depth == 0


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        (-1, "must be at least 0, got -1"),
        *((wrong, "must be a whole number, got ") for wrong in (0.5, "2", None, True, torch.tensor(2), np.ones(2))),
    ],
    ids=str,
)
def test_a_number_of_passes_that_cannot_be_done_is_refused(passes: Any, words: str) -> None:
    words = f"smooth_depth {words}"
    with pytest.raises(ValueError, match=words):
        mb.Geometry(uneven(4, 4), 50.0).smoothed(passes)
    with pytest.raises(ValueError, match=words):
        mb.convert(Tiny(), smooth_depth=passes)
    with pytest.raises(ValueError, match=words):
        mb.deeplabv3plus("resnet10t", 5, pretrained=False, smooth_depth=passes)
    with pytest.raises(ValueError, match=words):
        ModelConfig(smooth_depth=passes)


def test_compiled_it_is_the_same() -> None:
    torch._dynamo.reset()
    model, (rgb, depth) = lively(Tiny()).eval(), scene()
    net = mb.convert(model, smooth_depth=2)
    with torch.no_grad():
        expected = net(rgb, depth=depth, focal=60.0)
        output = torch.compile(net, backend="aot_eager", fullgraph=True)(rgb, depth=depth, focal=60.0)
    assert torch.allclose(output, expected, atol=1e-5)


def test_onnx_at_sizes_it_was_not_exported_with(tmp_path: Path) -> None:
    run = as_onnx(smooth, torch.rand(1, 1, 64, 96), tmp_path)
    for height, width in [(64, 96), (33, 47)]:
        depth = torch.rand(1, 1, height, width)
        assert torch.equal(run(depth), smooth(depth))
