"""The law that the scale of depth cancels in Eq. 1, from the layers to the command line, and where it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

import malleable as mb
from helpers.networks import Tiny, lively, scene
from helpers.toys import scenes, write_run
from malleable import cli
from malleable.models.summary import is_scale_free
from malleable.ops.engines.native import build
from malleable.runs.config import ModelConfig

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
FREE: dict[str, Any] = {
    "malleable": lambda: mb.MalleableConv2d(4, 6, 3, padding=1),
    "malleable K=5, dilated": lambda: mb.MalleableConv2d(4, 6, 3, padding=2, dilation=2, kernels=5, invalid="uniform"),
    "2.5D": lambda: mb.Conv25d(4, 6, 3, 2, 1),
}


@pytest.mark.parametrize("engine", ["plain", "blocks", "native"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", FREE)
def test_a_layer_does_not_see_the_scale(
    kind: str, dtype: torch.dtype, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = dtype in (torch.bfloat16, torch.float16)
    if (engine == "native" and (dtype == torch.float64 or isinstance(build.library(), str))) or (
        engine == "blocks" and half
    ):
        pytest.skip("this engine does not run this dtype here")
    monkeypatch.setenv("MALLEABLE_ENGINE", engine)
    torch.manual_seed(0)
    layer = FREE[kind]().to(dtype)
    x, (_, depth) = torch.randn(2, 4, 16, 16).to(dtype), scene()
    depth = depth.double()  # rounded once, where the layer rounds it

    @settings(max_examples=10, deadline=None)
    @given(st.floats(1e-3, 1e3))
    def holds(factor: float) -> None:
        expected = layer(x, mb.Geometry(depth, 50.0))
        output = layer(x, mb.Geometry(depth * factor, 50.0))
        power = layer(x, mb.Geometry(depth * 2.0 ** round(np.log2(factor)), 50.0))
        assert torch.equal(power, expected)
        if isinstance(layer, mb.MalleableConv2d):  # a hard border may lie within rounding of a pixel
            assert (output - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()

    holds()


NETWORKS: dict[str, Any] = {
    "converted": lambda: mb.convert(lively(Tiny())),
    "converted, relative channel": lambda: mb.convert(lively(Tiny()), depth_input="relative"),
    "converted, relative channel, filled": lambda: mb.convert(lively(Tiny()), depth_input="relative", fill_depth=True),
    "converted, relative channel, smoothed": lambda: mb.convert(lively(Tiny()), depth_input="relative", smooth_depth=2),
    "2.5D": lambda: mb.convert(lively(Tiny()), "conv25d"),
    "DeepLabv3+": lambda: deeplab("malleable", None),
    "DeepLabv3+, relative channel": lambda: deeplab("malleable", "relative"),
}


def deeplab(conv: str | None, depth_input: Any) -> nn.Module:
    torch.manual_seed(0)
    net = mb.deeplabv3plus("resnet10t", 5, conv, depth_input=depth_input, pretrained=False, width=16, skip=8)
    channel = net.backbone.depth_input
    if channel is not None:
        nn.init.normal_(channel.conv.weight)
    return lively(net)  # the branches of new residual units would give nothing


def answers(net: nn.Module, change: Any) -> tuple[Tensor, Tensor]:
    rgb, depth = scene(1)
    with torch.no_grad():
        return net(rgb, depth=depth, focal=60.0), net(rgb, depth=change(depth), focal=60.0)


@pytest.mark.parametrize("factor", [0.25, 1024.0])
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_does_not_see_it(kind: str, factor: float) -> None:
    net = NETWORKS[kind]()
    assert is_scale_free(net)
    assert torch.equal(*answers(net, lambda depth: depth * factor))
    output, other = answers(net, lambda depth: depth * 0.37)
    if kind != "2.5D":
        assert (output - other).abs().max() <= 1e-4 * output.abs().max()


@pytest.mark.parametrize(("conv", "depth_input"), [("depth_aware", None), (None, "metric"), ("malleable", "metric")])
def test_what_takes_metres_sees_it(conv: str | None, depth_input: Any) -> None:
    net = deeplab(conv, depth_input)
    assert not is_scale_free(net)
    output, other = answers(net, lambda depth: depth * 4)
    assert (output - other).abs().max() > 1e-3 * output.abs().max()


def test_the_law_is_not_one_of_shifts_nor_of_focal_lengths() -> None:
    net = NETWORKS["converted"]()
    output, other = answers(net, lambda depth: torch.where(depth > 0, depth + 1, 0.0))
    assert (output - other).abs().max() > 1e-2 * output.abs().max()
    rgb, depth = scene(1)
    with torch.no_grad():
        other = net(rgb, depth=depth, focal=120.0)
    assert (output - other).abs().max() > 1e-2 * output.abs().max()


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    sample = scenes()[0]
    Image.fromarray(sample.image.permute(1, 2, 0).numpy()).save(folder / "a.png")
    counts = (sample.depth[0].numpy() * 1000).round().astype(np.uint16)
    Image.fromarray(counts).save(folder / "a_depth.png")
    return folder / "a.png"


def labelled(run: Path, picture: Path, out: Path, *arguments: str) -> tuple[int, Any]:
    code = cli.main(["predict", str(run), str(picture), "--out", str(out), "--focal", "30", *arguments])
    return code, np.array(Image.open(out / "labels" / "a.png")) if code == 0 else None


def test_predict_needs_no_unit_where_the_network_needs_none(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    _, millimetres = labelled(run, picture, tmp_path / "mm", "--unit", "mm")
    assert "note" not in capsys.readouterr().err
    code, without = labelled(run, picture, tmp_path / "none")
    assert code == 0
    assert "note: depth has no unit, and this network needs none" in capsys.readouterr().err
    assert (without == millimetres).mean() > 0.999


def test_predict_asks_for_the_unit_where_it_matters(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", model=ModelConfig("resnet10t", conv="depth_aware", stages=(3,), pretrained=False))
    assert labelled(run, picture, tmp_path / "out")[0] == 1
    assert "has no unit; add --unit" in capsys.readouterr().err
