from __future__ import annotations

import math
import shlex
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from malleable import cli
from malleable.runs.config import Config, DataConfig, ModelConfig, TrainConfig, build_network, parse_config
from malleable.runs.settings import UsageError, read_settings

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
PAPER = ("nyudv2", "cityscapes")
DEEPLABS = [path for path in CONFIGS if path.parent.name != "networks"]  # tests/commands/test_networks.py runs these


def parsed(path: Path, *arguments: str) -> tuple[Config, str]:
    """The settings and the run's folder that the command line hands to the loop."""
    with patch("malleable.commands.train.fit") as fit:
        assert cli.main(["train", "--config", str(path), *arguments]) == 0
    (config, out), _ = fit.call_args
    return config, out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_config_parses_and_begins_with_its_command(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert shlex.split(first.removeprefix("# ")) == ["malleable", "train", "--config", str(path.relative_to(ROOT))]
    config, out = parsed(path)
    assert out == f"runs/{path.relative_to(ROOT / 'configs').with_suffix('')}"
    assert Config.from_dict(config.to_dict()) == config


def test_every_row_of_the_tables_differs_from_the_others() -> None:
    rows = [parsed(path)[0] for path in CONFIGS if path.parent.name in PAPER and path.stem != "base"]
    assert len(rows) == 17 + 2 + 5
    assert len({str(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("name", PAPER)
def test_the_recipes_are_the_paper_s(name: str) -> None:
    for path in CONFIGS:
        if path.parent.name != name or path.stem.startswith("released"):
            continue
        config, _ = parsed(path)
        recipe = config.train
        assert (recipe.lr, recipe.momentum, recipe.weight_decay, recipe.power) == (0.01, 0.9, 1e-4, 0.9)
        assert recipe.batch_size == 16
        assert config.data.scales == (0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
        assert config.model.backbone == ("resnet101s" if path.stem.startswith("r101") else "resnet50s")
        assert config.model.pretrained is True
        nyu = name == "nyudv2"
        assert recipe.steps == (40_000 if nyu else 60_000)
        assert config.data.crop == ((480, 480) if nyu else (800, 800))
        assert recipe.loss == ("cross_entropy" if nyu else "bootstrapped")
        assert config.model.merge == nyu
        assert config.data.val == ("test" if nyu else "val")


@pytest.mark.parametrize("layers", [50, 101])
def test_the_released_recipes_are_those_of_the_authors_code(layers: int) -> None:
    config, _ = parsed(ROOT / f"configs/nyudv2/released_r{layers}.yaml")
    model, data, recipe = config.model, config.data, config.train
    assert (model.backbone, model.merge, model.invalid, model.kernels) == (f"resnet{layers}s", "released", "uniform", 3)
    assert (recipe.lr, recipe.momentum, recipe.weight_decay, recipe.power) == (0.02, 0.9, 5e-4, 0.9)
    assert (recipe.steps, recipe.batch_size) == (80 * 490, 16)
    assert (recipe.auxiliary, recipe.norm_momentum, recipe.hold_middle) == (0.4, 0.01, True)
    assert (data.crop, data.scales) == ((480, 480), (0.75, 1.0, 1.25, 1.5, 1.75))


def test_an_auxiliary_loss_needs_its_classifier() -> None:
    with pytest.raises(ValueError, match=r"only model\.merge=released has such a classifier"):
        Config(train=TrainConfig(auxiliary=0.4))


@pytest.mark.parametrize("path", DEEPLABS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_config_s_layers_can_be_built(path: Path) -> None:
    model = parsed(path)[0].model
    small = ModelConfig(**{**model.__dict__, "backbone": "resnet10t"})
    layers = [m for m in build_network(small, 3, pretrained=False).modules() if type(m).__name__.endswith("Conv2d")]
    placed = [layer for layer in layers if hasattr(layer, "centers")]
    if model.conv == "malleable":
        assert len(placed) == len(model.stages)
        assert placed[0].centers.shape == (model.kernels + 2,)
        assert placed[0].centers.requires_grad == ("centers" in model.learnable)
        assert placed[0].temperature.item() == pytest.approx(model.temperature)


def test_the_command_line_goes_before_the_file() -> None:
    config, out = parsed(ROOT / "configs/nyudv2/r50_malleable_k1.yaml", "--train.lr=0.005", "--out=elsewhere")
    assert (config.train.lr, config.model.kernels, config.model.merge, out) == (0.005, 1, True, "elsewhere")


def test_print_config_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "--config", str(ROOT / "configs/nyudv2/r50_rgb.yaml"), "--print_config"])
    printed = capsys.readouterr().out
    assert "conv: null" in printed
    for section, kind in (("model", ModelConfig), ("data", DataConfig), ("train", TrainConfig)):
        assert f"{section}:" in printed
        assert all(f"  {field}:" in printed for field in kind.__dataclass_fields__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.lrr", "1"], "unknown setting 'train.lrr', did you mean 'train.lr'?"),
        (["--lr", "1"], "unknown setting 'lr', did you mean 'train.lr'?"),
        (["--model.backbon=x"], "unknown setting 'model.backbon', did you mean 'model.backbone'?"),
    ],
)
def test_unknown_names_get_the_nearest(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_unknown_keys_of_a_file_get_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("train:\n  batchsize: 8\n")
    assert cli.main(["train", "--config", str(tmp_path / "a.yaml")]) == 2
    assert "'train.batchsize', did you mean 'train.batch_size'?" in capsys.readouterr().err


def test_a_base_is_relative_to_its_file_and_lists_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.yaml").write_text("train: {lr: 1e-3, steps: 5}\nmodel: {stages: [2, 3, 4]}\n")
    (tmp_path / "deep" / "a.yaml").write_text("base: ../base.yaml\ntrain: {steps: 7}\nmodel: {stages: [5]}\n")
    settings = read_settings(tmp_path / "deep" / "a.yaml")
    assert settings == {"train": {"lr": 1e-3, "steps": 7}, "model": {"stages": [5]}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: a.yaml\n", "builds on itself"),
        ("base: [a, b]\n", "must name one file"),
        ("base: absent.yaml\n", "there is no file .*absent.yaml, the base of"),
        ("- 1\n", "must hold settings by name"),
        ("train: {lr: [\n", "no plain YAML"),
        ("out: !!python/object/apply:os.mkdir [trace]\n", "no plain YAML"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_settings(Path("a.yaml"))
    assert not Path("trace").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(steps=0), "train.steps must be at least 1, got 0"),
        (lambda: TrainConfig(lr=-1.0), "train.lr must be positive, got -1.0"),
        (lambda: TrainConfig(ema=1.0), "train.ema must lie between 0 and 1"),
        (lambda: TrainConfig(clip=0.0), "train.clip must be positive"),
        (lambda: TrainConfig(momentum=-0.1), "train.momentum must not be negative"),
        (lambda: DataConfig(flip=2.0), "data.flip must be a probability from 0 to 1, got 2.0"),
        (lambda: DataConfig(workers=-1), "data.workers must not be negative, got -1"),
        (lambda: DataConfig(crop=(0, 40)), r"data.crop must be a height and a width of at least 1, got \[0, 40\]"),
        (lambda: ModelConfig(conv="conv25d", temperature=2.0), "model.temperature is set to 2.0, but conv=conv25d"),
        *(
            (lambda name=name, value=value: TrainConfig(**{name: value}), f"train.{name} must .*, got {value}")
            for name in ("lr", "power", "momentum", "weight_decay", "clip", "head_lr", "bootstrap_floor")
            for value in (math.nan, math.inf)
        ),
        (lambda: DataConfig(scales=(1.0, math.inf)), "data.scales must be finite, got inf"),
        (lambda: ModelConfig(temperature=math.nan), "model.temperature must be finite, got nan"),
        (lambda: Config.from_dict({"model": {"colour": 1}}), "not of this version"),
    ],
)
def test_bad_settings_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_numbers_of_numpy_are_numbers() -> None:
    crop = (np.int32(32), np.int32(40))
    config = parse_config({"train": {"seed": np.int64(3), "lr": np.float32(0.5)}, "data": {"crop": crop}})
    assert config == Config(data=DataConfig(crop=(32, 40)), train=TrainConfig(seed=3, lr=0.5))


def test_a_setting_that_no_file_could_hold_is_named() -> None:
    with pytest.raises(ValueError, match=r"train.lr must be a number, .* got object"):
        parse_config({"train": {"lr": object()}})
