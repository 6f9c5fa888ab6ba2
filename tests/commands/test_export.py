"""Exported networks, run by another runtime and compared with PyTorch."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import malleable as mb
from helpers.toys import scenes, write_run
from malleable import cli
from malleable import progress as parallel
from malleable.commands import export
from malleable.data import eval_transform
from malleable.data.palette import default_palette
from malleable.inference.load import Trained, load_trained


class Small(nn.Module):
    """A stem, a convolution that sees depth, logits at image size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.conv = mb.MalleableConv2d(4, 5, 3, 2, 1)

    def forward(self, image: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        x = self.conv(self.stem(image), mb.Geometry(depth, focal))
        return nn.functional.interpolate(x, image.shape[-2:], mode="bilinear")


SMALL = Trained(Small().eval(), tuple("abcde"), default_palette(5))  # type: ignore[arg-type]


def test_onnx_agrees_with_pytorch_at_other_sizes(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    net, path = Small().eval(), tmp_path / "m.onnx"
    difference = export.write_onnx(net, path, export.description(SMALL))
    assert difference is not None
    assert difference < 1e-5
    assert list(tmp_path.iterdir()) == [path]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    shapes = {value.name: (value.type, value.shape) for value in (*session.get_inputs(), *session.get_outputs())}
    assert shapes == {
        "image": ("tensor(uint8)", ["batch", 3, "height", "width"]),
        "depth": ("tensor(float)", ["batch", 1, "height", "width"]),
        "focal": ("tensor(float)", ["batch"]),
        "logits": ("tensor(float)", ["batch", 5, "height", "width"]),
    }
    assert session.get_modelmeta().custom_metadata_map.items() >= export.description(SMALL).items()
    sample = mb.data.SyntheticScenes(size=(60, 45), length=1)[0]
    normalised = eval_transform()(sample)
    focal = torch.tensor([sample.camera.focal])
    arrays = {"image": sample.image[None].numpy(), "depth": sample.depth[None].numpy(), "focal": focal.numpy()}
    with torch.no_grad():
        expected = net(normalised.image[None].as_subclass(Tensor), sample.depth[None].as_subclass(Tensor), focal)
    torch.testing.assert_close(torch.from_numpy(session.run(None, arrays)[0]), expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_differs_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    runner = export._onnx_runner
    monkeypatch.setattr(export, "_onnx_runner", lambda path: lambda *inputs: runner(path)(*inputs) + 2e-3)
    with pytest.raises(RuntimeError, match=r"at \(1, 97, 131\) the written model differs from PyTorch by"):
        export.write_onnx(Small().eval(), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(export, "find_spec", lambda name, *rest: None if name in missing else found(name, *rest))


def test_a_check_that_was_skipped_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    without(monkeypatch, "onnxruntime")
    monkeypatch.setattr(export, "load_trained", lambda *_: SMALL)
    assert cli.main(["export", "x", str(tmp_path / "m.onnx")]) == 0
    assert "not checked: onnxruntime is not installed" in capsys.readouterr().out


def test_onnx_files_say_what_their_numbers_mean() -> None:
    about = export.description(SMALL)
    assert json.loads(about["classes"]) == ["a", "b", "c", "d", "e"]
    assert json.loads(about["palette"]) == [list(colour) for colour in SMALL.palette]
    assert json.loads(about["mean"]) == pytest.approx([123.675, 116.28, 103.53])
    assert json.loads(about["std"]) == pytest.approx([58.395, 57.12, 57.375])
    assert about["depth_unit"] == "any"
    metric = dataclasses.replace(SMALL, net=mb.DepthAwareConv2d(3, 5, 3))  # type: ignore[arg-type]
    assert export.description(metric)["depth_unit"] == "metre"


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "onnxscript")
    with pytest.raises(RuntimeError, match="ONNX needs onnxscript: pip install onnxscript"):
        export.write_onnx(Small(), tmp_path / "m.onnx")


def test_torch_program_needs_no_operator_of_this_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, traced = {}, torch.export.export

    def noted(*args: Any, **given: Any) -> Any:
        options.update(given)
        return traced(*args, **given)

    monkeypatch.setattr(torch.export, "export", noted)
    assert export.write_torch(Small(), tmp_path / "m.pt2") < 1e-5
    targets = [str(node.target) for node in torch.export.load(tmp_path / "m.pt2").graph.nodes]
    assert not [target for target in targets if "malleable" in target]
    assert options["strict"] is False  # the default of PyTorch 2.7 is another


@pytest.mark.slow
def test_torch_program_of_a_whole_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, path = write_run(tmp_path / "run"), tmp_path / "m.pt2"
    assert cli.main(["export", str(run), str(path)]) == 0
    assert "agrees with PyTorch to" in capsys.readouterr().out
    program = torch.export.load(path).module()
    sample = mb.data.SyntheticScenes(size=(50, 70), length=1)[0]
    normalised = eval_transform()(sample)
    focal = torch.tensor([sample.camera.focal])
    with torch.no_grad():
        expected = load_trained(run).net(normalised.image[None], depth=sample.depth[None], focal=focal)
        actual = program(sample.image[None].as_subclass(Tensor), sample.depth[None].as_subclass(Tensor), focal)
    torch.testing.assert_close(actual, expected.as_subclass(Tensor), rtol=1e-4, atol=1e-4)


class Mixed(nn.Module):
    """The layers that Small does not have, with groups, dilation and a kernel without a middle."""

    def __init__(self) -> None:
        super().__init__()
        self.hard = mb.Conv25d(3, 6, 3, padding=2, dilation=2, groups=3)
        self.soft = mb.DepthAwareConv2d(6, 4, 2, padding="same", invalid="ignore")
        self.pool = mb.DepthAwareAvgPool2d(3, 2, 1)
        self.depthwise = mb.MalleableConv2d(4, 4, 5, 2, 2, groups=4, kernels=2, invalid="uniform")

    def forward(self, image: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        geometry = mb.Geometry(depth, focal)
        x = self.soft(self.hard(image, geometry), geometry)
        return nn.functional.interpolate(self.depthwise(self.pool(x, geometry), geometry), image.shape[-2:])


@pytest.mark.slow
def test_onnx_of_every_layer(tmp_path: Path) -> None:
    onnx, path = pytest.importorskip("onnx"), tmp_path / "m.onnx"
    difference = export.write_onnx(Mixed().eval(), path)
    assert difference is not None
    assert difference < 1e-5
    assert {node.domain for node in onnx.load(path).graph.node} == {""}  # operators that every runtime has


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "merge"), [("resnet18", False), ("resnet18", True), ("mobilenetv3_large_100", False)]
)
def test_onnx_of_a_whole_network(tmp_path: Path, backbone: str, merge: bool) -> None:
    net = mb.deeplabv3plus(backbone, num_classes=len(scenes().classes), merge=merge, pretrained=False).eval()
    difference = export.write_onnx(net, tmp_path / "m.onnx")
    assert difference is not None
    assert difference < 1e-3


@pytest.mark.slow
def test_the_recipe_for_int8(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    run, model, small = write_run(tmp_path / "run"), tmp_path / "m.onnx", tmp_path / "int8.onnx"
    assert cli.main(["export", str(run), str(model)]) == 0
    recipe = Path(__file__).parents[2] / "examples" / "int8.py"
    subprocess.run([sys.executable, recipe, model, "rooms", small, "--images", "4"], check=True)
    sample = mb.data.SyntheticScenes(size=(60, 80), length=1)[0]
    focal = torch.tensor([sample.camera.focal])
    arrays = {"image": sample.image[None].numpy(), "depth": sample.depth[None].numpy(), "focal": focal.numpy()}
    exact, rounded = (
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, arrays)[0]
        for path in (model, small)
    )
    assert abs(rounded - exact).max() < 0.1 * abs(exact).max()
    assert small.stat().st_size < model.stat().st_size / 2
    assert (exact != rounded).any()


def test_without_a_terminal_lines_say_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parallel, "EVERY", 0.01)
    monkeypatch.setattr(export, "write_onnx", lambda net, path, about: time.sleep(0.1 if "classes" in about else 0))
    assert cli.main(["export", str(write_run(tmp_path)), str(tmp_path / "m.onnx")]) == 0
    assert "m.onnx: 0:00:00\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("m.tflite", "file must end in .onnx or .pt2"),
        ("m.onnx --format torch", "file ends in .onnx, but format is torch"),
        ("taken.onnx", "exists and is left as it is"),
        ("no/m.onnx", "there is no folder"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.onnx").write_text("mine")
    file, *flags = name.split()
    assert cli.main(["export", str(tmp_path / "no such run"), str(tmp_path / file), *flags]) == 1
    assert words in capsys.readouterr().err
    assert (tmp_path / "taken.onnx").read_text() == "mine"
