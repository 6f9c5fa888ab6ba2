"""Every command with networks of other libraries and of one's own, two steps of training each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import make_data, metrics
from malleable import cli
from malleable.inference.load import load_trained
from malleable.models.foreign import Foreign
from malleable.runs.config import Config, DataConfig, ModelConfig, TrainConfig
from malleable.runs.folder import read_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "networks").glob("*.yaml"))

SHORT = {
    "data.crop": "[32,32]",
    "data.workers": 0,
    "train.steps": 2,
    "train.batch_size": 2,
    "train.warmup": 0,
    "train.validate_every": 0,
    "train.log_every": 1,
    "accelerator": "cpu",
}
UNET = {
    "model.network": "smp:Unet",
    "model.options.encoder_name": "resnet18",
    "model.options.decoder_channels": "[16,8,8,8,8]",
    "model.pretrained": "false",
}
OWN = {"model.network": "my_network:build", "model.options": "{width: 6}", "train.checkpoint_every": 1}
FACTORY = """
from torch import nn

class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
    def forward(self, x):
        return x + self.conv(x)

def build(num_classes, width=4):
    stem = nn.Conv2d(3, width, 3, 2, 1)
    return nn.Sequential(stem, nn.BatchNorm2d(width), Residual(width), nn.Conv2d(width, num_classes, 1))
"""


def train(out: Path, config: Path | None = None, **settings: Any) -> int:
    chosen = {**SHORT, "out": out, **{key.replace("__", "."): value for key, value in settings.items()}}
    file = [] if config is None else ["--config", str(config)]  # what is said later goes before it
    return cli.main(["train", *file, *(f"--{key}={value}" for key, value in chosen.items())])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def unet(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "unet"
    assert train(out, data__root=data, **UNET) == 0
    return out


@pytest.fixture
def own(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a network of one's own, whose module is no longer imported."""
    (tmp_path / "my_network.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_network", raising=False)
    assert train(tmp_path / "own", data__root=data, **OWN) == 0
    del sys.modules["my_network"]
    return tmp_path / "own"


@pytest.mark.parametrize("root", ["rooms", "a folder"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configs_run(path: Path, root: str, data: Path, tmp_path: Path) -> None:
    where = data if root == "a folder" else root
    out = tmp_path / "run"
    assert train(out, config=path, data__root=where, train__validate_last="false") == 0
    assert [row["step"] for row in metrics(out)] == [1, 2]
    assert any(name.startswith("receptive_field/") for name in metrics(out)[-1])
    assert read_config(out).model.network in path.read_text()


def test_a_checkpoint_rebuilds_its_network(unet: Path) -> None:
    trained = load_trained(unet)
    assert isinstance(trained.net, Foreign)
    assert trained.net.settings["options"] == {"encoder_name": "resnet18", "decoder_channels": [16, 8, 8, 8, 8]}
    assert len(trained.net.settings["where"]) == 4
    assert (trained.config, trained.step) == (read_config(unet), 2)


def test_a_checkpoint_keeps_its_places_if_the_rule_changes(
    own: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("malleable.models.stages.Watched.first_of_stages", lambda watched: ["0"])
    net = load_trained(own, trust=True).net
    assert isinstance(net, Foreign)
    assert net.places == ("2.conv",)
    assert train(own, **OWN, data__root=data, resume="auto", train__steps=3) == 1
    assert "which placed its layers at 2.conv; this version places them at 0. Go on with" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_name_its_places_follows_the_rule(own: Path) -> None:
    path = own / "checkpoints/best.pt"
    content = torch.load(path, weights_only=True)
    del content["places"]
    torch.save(content, own / "old.pt")
    old, new = (load_trained(path, trust=True).net.state_dict() for path in (own / "old.pt", path))
    assert all(torch.equal(new[name], value) for name, value in old.items())


def test_a_run_goes_on_bit_for_bit(own: Path, data: Path, tmp_path: Path) -> None:
    whole = load_trained(own, trust=True).net.state_dict()
    for name in ("step-00000002.pt", "best.pt"):
        (own / "checkpoints" / name).unlink()
    assert train(own, **OWN, data__root=data, resume="auto") == 0
    again = load_trained(own, trust=True).net.state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_evaluate_and_predict(unet: Path, data: Path, tmp_path: Path) -> None:
    assert cli.main(["evaluate", str(unet), "--out", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["step"] == 2
    assert cli.main(["predict", str(unet), str(data), "--split", "val", "--out", str(tmp_path / "p")]) == 0
    assert len(list((tmp_path / "p/labels").rglob("*.png"))) == 2


def test_figures_say_what_needs_deeplab_s_structure(
    unet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("receptive_fields", "neighbours", "receptive_field_path")
    command = ["figures", str(unet), "--out", str(tmp_path / "f"), "--formats", "png", "--only"]
    assert cli.main([*command, *names]) == 0
    assert {path.stem for path in (tmp_path / "f").iterdir()} == set(names)
    assert cli.main([*command, "neighbours", "--layer", "res2"]) == 1
    assert "layer must be one of encoder.layer1.0.conv1, encoder.layer2.0.conv1" in capsys.readouterr().err
    assert cli.main([*command, "network"]) == 1
    assert "network cannot be drawn: the drawing is one of DeepLabv3+, and the network is" in capsys.readouterr().err


def test_push_and_pull(unet: Path, tmp_path: Path) -> None:
    assert cli.main(["push", str(unet), str(tmp_path / "shared")]) == 0
    assert cli.main(["pull", str(tmp_path / "shared"), str(tmp_path / "pulled")]) == 0
    trained, pulled = load_trained(unet), load_trained(tmp_path / "pulled")
    assert pulled.net.settings == json.loads(json.dumps(trained.net.settings))  # which has tuples
    weights = pulled.net.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in trained.net.state_dict().items())


@pytest.mark.slow
def test_export(own: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(own), str(tmp_path / "m.pt2"), "--trust"]) == 0  # compares it with PyTorch


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_onnx_of_the_shipped_configs(path: Path, data: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    settings = {"train__steps": 1, "train__validate_last": "false"}
    assert train(tmp_path / "run", config=path, data__root=data, **settings) == 0
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "m.onnx")]) == 0  # compares it with PyTorch
    meta = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"]).get_modelmeta()
    assert json.loads(meta.custom_metadata_map["classes"]) == list(load_trained(tmp_path / "run").classes)


@pytest.mark.slow
def test_export_of_a_network_that_pads(unet: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(unet), str(tmp_path / "m.pt2")]) == 0


def test_a_study_of_foreign_networks_is_planned(tmp_path: Path) -> None:
    from malleable.reports.plan import read_plan

    rows = "rows: {a: {model: {conv: null}}, b: {}}\nseeds: [0]\ntitle: t\nout: o\n"
    settings = "settings: {model: {network: %s, options: {encoder_name: resnet18}}}\n"
    (tmp_path / "s.yaml").write_text(rows + settings % "smp:Unet")
    assert [run.config.model.conv for run in read_plan(tmp_path / "s.yaml").runs] == [None, "malleable"]
    (tmp_path / "s.yaml").write_text(rows + settings % "smp:Unett")
    with pytest.raises(ValueError, match="got 'Unett'"):
        read_plan(tmp_path / "s.yaml")


COMMANDS = {
    "evaluate": "evaluate RUN --out OUT/r.json",
    "predict": "predict RUN DATA --split val --out OUT/p",
    "figures": "figures RUN --out OUT/f --only qualitative --formats png",
    "export": "export RUN OUT/m.pt2",
    "push": "push RUN OUT/shared",
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_checkpoint_s_own_factory_runs_only_with_trust(
    verb: str,
    own: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("malleable.commands.export.write_torch", lambda net, path: 0.0)  # takes long
    places = {"RUN": own, "DATA": data, "OUT": tmp_path / "out"}
    (tmp_path / "out").mkdir()
    words = COMMANDS[verb]
    for name, place in places.items():
        words = words.replace(name, str(place))
    assert cli.main(words.split()) == 1
    assert "'my_network:build', and building it runs code" in capsys.readouterr().err
    assert "my_network" not in sys.modules
    assert cli.main([*words.split(), "--trust"]) == 0
    assert "my_network" in sys.modules


def test_a_shared_folder_s_own_factory_runs_only_with_trust(own: Path, tmp_path: Path) -> None:
    shared, pulled = tmp_path / "shared", tmp_path / "pulled"
    assert cli.main(["push", str(own), str(shared), "--trust"]) == 0
    del sys.modules["my_network"]
    assert cli.main(["pull", str(shared), str(pulled)]) == 1
    assert "my_network" not in sys.modules
    assert not pulled.exists()
    assert cli.main(["pull", str(shared), str(pulled), "--trust"]) == 0
    assert load_trained(pulled, trust=True).net.settings["options"] == {"width": 6}


def test_a_report_leaves_out_what_it_may_not_build(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("malleable.figures.run.NAMES", ("assigning_functions",))
    assert cli.main(["report", str(own), "--out", str(tmp_path / "r.html")]) == 0
    assert "my_network" not in sys.modules
    assert "my_network:build" in (tmp_path / "r.html").read_text()
    assert cli.main(["report", str(own), "--out", str(tmp_path / "t.html"), "--trust"]) == 0
    assert "my_network" in sys.modules
    assert "could not be drawn" not in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"network": "smp:Unet", "backbone": "resnet18"}, "model.backbone is set .* stand under model.options"),
        ({"network": "smp:Unet", "stages": (2,)}, "model.stages is set"),
        ({"network": "smp:Unet", "depth_encoder": "metric"}, "model.depth_encoder is set to metric"),
        ({"where": "all"}, "model.where is set to all, but network=deeplabv3plus does not take it"),
        ({"options": {"a": 1}}, "model.options is set"),
    ],
)
def test_settings_of_another_network_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(**settings)


def test_settings_of_foreign_networks_travel_and_can_be_keys() -> None:
    model = ModelConfig(network="smp:Unet", options={"decoder_channels": [16, 8]}, where=("a.*", "b"))
    config = Config(model, DataConfig(), TrainConfig())
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert len({config, Config.from_dict(config.to_dict())}) == 1
