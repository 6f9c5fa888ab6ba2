"""What is left of a network's scores when depth is not what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import malleable as mb
from helpers.toys import scenes, write_run
from malleable import cli
from malleable.data import FolderWriter
from malleable.data.faults import STRESSES, chosen_stresses
from malleable.figures.stress import stress
from malleable.inference.evaluate import evaluate_network
from malleable.inference.stress import stress_network
from malleable.runs.scores import Protocol, Scores

DATA = scenes()


class Labelling(nn.Module):
    """A convolution, and what it was converted to, as a network that labels."""

    def __init__(self, conv: str | None, depth_input: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = nn.Conv2d(3, len(DATA.classes), 3, padding=1)
        self.net = mb.convert(model, conv, where="all", depth_input=depth_input)  # type: ignore[arg-type]
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, image: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        logits: Tensor = self.net(image, depth=depth, focal=focal)
        return logits


def measured(net: nn.Module) -> tuple[float, dict[str, float]]:
    miou = evaluate_network(net, DATA).miou
    return miou, stress_network(net, DATA, Protocol(), miou)


@pytest.mark.parametrize(("conv", "depth_input"), [("malleable", None), ("conv25d", None), (None, "relative")])
def test_what_is_scale_free_does_not_see_the_scale(conv: str | None, depth_input: str | None) -> None:
    miou, found = measured(Labelling(conv, depth_input))
    assert found["depth × 4"] == miou
    assert found["depth × 0.25"] == miou
    for name in ("depth × 0.1", "depth × 10", "depth × 0.1 … 10 at random"):
        assert found[name] == pytest.approx(miou, abs=0.02)  # a pixel on the border of two classes
    assert found["no depth"] != miou


@pytest.mark.parametrize(("conv", "depth_input"), [("depth_aware", None), (None, "metric")])
def test_what_is_not_does(conv: str | None, depth_input: str | None) -> None:
    miou, found = measured(Labelling(conv, depth_input))
    assert abs(found["depth × 4"] - miou) > 0.1


def test_a_network_without_depth_is_not_asked() -> None:
    class Silent(Labelling):
        def forward(self, image: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
            raise AssertionError("it was asked")

    found = stress_network(Silent(None), DATA, Protocol(), 12.5)
    assert found == {fault.name: 12.5 for fault in STRESSES}


def test_the_command_writes_table_figure_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "x")
    writer = FolderWriter(tmp_path / "set", "tiny", DATA.classes, DATA.palette)
    writer.write(DATA[0])
    writer.finish({"val": DATA.ids[:1]})
    command = ["evaluate", str(run), "--dataset", str(tmp_path / "set"), "--out", str(tmp_path / "r.json"), "--stress"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())["stress"]
    assert list(found) == [fault.name for fault in STRESSES]
    assert all(name in shown for name in found)
    assert Scores.read(tmp_path / "r.json").stress == found
    with Image.open(tmp_path / "r-stress.png") as picture:
        assert min(picture.size) > 500
    (tmp_path / "r.json").unlink()
    assert cli.main(command) == 1
    assert "stress.png exists and is left as it is" in capsys.readouterr().err


def test_other_splits_are_measured_as_if_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x")
    writer = FolderWriter(tmp_path / "set", "tiny", DATA.classes, DATA.palette)
    for index in (0, 1):
        writer.write(DATA[index])
    writer.finish({"val": DATA.ids[:1], "night": DATA.ids[1:2]})
    command = ["evaluate", str(run), "--dataset", str(tmp_path / "set")]
    assert cli.main([*command, "--out", str(tmp_path / "both.json"), "--also", "night"]) == 0
    assert cli.main([*command, "--out", str(tmp_path / "one.json"), "--split", "night"]) == 0
    both, one = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("both", "one"))
    assert both["split"] == "val"
    assert both["splits"] == {"night": one["miou"]}
    assert "stress" not in both
    assert not list(tmp_path.glob("*.png"))


def test_some_faults_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert [fault.name for fault in chosen_stresses(("no depth", "depth × 4"))] == ["depth × 4", "no depth"]
    assert chosen_stresses(()) is STRESSES
    assert cli.main(["evaluate", "runs/x", "--stress", "--faults", "no depht"]) != 0
    assert "'no depht'" in capsys.readouterr().err
    assert cli.main(["evaluate", "runs/x", "--faults", "no depth"]) != 0
    assert "no effect without --stress" in capsys.readouterr().err


def test_the_figure_has_a_line_a_row_from_no_fault_on() -> None:
    rows = {
        name: (40.0 + shift, {fault.name: 20.0 + shift for fault in STRESSES}) for name, shift in (("a", 0), ("b", 5))
    }
    figure = stress(rows)  # type: ignore[arg-type]
    scale = figure.axes[0]
    first, second = (line.get_xydata().tolist() for line in scale.get_lines())
    assert first == [[0.1, 20.0], [0.25, 20.0], [1.0, 40.0], [4.0, 20.0], [10.0, 20.0]]
    assert second[2] == [1.0, 45.0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
