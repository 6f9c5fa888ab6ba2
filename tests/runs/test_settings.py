"""What the command line answers to wrong settings: a line or two with the setting, the value and what is allowed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from malleable import cli
from malleable.commands.train import train
from malleable.runs.settings import resolve

WRONG_VALUES = [
    ("train", "model.conv", "maleable", "malleable, conv25d, depth_aware or null", "malleable"),
    ("train", "model.conv", "Conv25D", "malleable, conv25d, depth_aware or null", "conv25d"),
    ("train", "model.kernels", "three", "a whole number", None),
    ("train", "model.kernels", "2.5", "a whole number", None),
    ("train", "model.stages", "[2,x]", "whole numbers", None),
    ("train", "model.stages", "all", "whole numbers", None),
    ("train", "model.output_stride", "15", "8, 16 or 32", None),
    ("train", "model.merge", "maybe", "true or false or released", None),
    ("train", "model.centers", "[-1,left,1]", "numbers or null", None),
    ("train", "model.temperature", "hot", "a number", None),
    ("train", "model.learnable", "[centres]", "some of centers, temperature, rebalance", "centers"),
    ("train", "model.invalid", "ignored", "same, uniform or ignore", "ignore"),
    ("train", "data.crop", "[96]", "2 whole numbers", None),
    ("train", "data.crop", "[96,96,3]", "2 whole numbers", None),
    ("train", "data.crop", "96", "2 whole numbers", None),
    ("train", "data.crop", "[a,b]", "2 whole numbers", None),
    ("train", "data.scales", "[1,big]", "numbers", None),
    ("train", "data.flip", "often", "a number", None),
    ("train", "data.workers", "two", "a whole number", None),
    ("train", "train.steps", "ten", "a whole number", None),
    ("train", "train.steps", "true", "a whole number", None),
    ("train", "train.steps", "1.5", "a whole number", None),
    ("train", "train.batch_size", "[8]", "a whole number", None),
    ("train", "train.lr", "fast", "a number", None),
    ("train", "train.lr", "nan", "a number", None),
    ("train", "train.loss", "crossentropy", "cross_entropy or bootstrapped", "cross_entropy"),
    ("train", "train.precision", "bf16", "32-true, 16-mixed or bf16-mixed", "bf16-mixed"),
    ("train", "train.clip", "none", "a number or null", None),
    ("train", "train.ema", "[]", "a number or null", None),
    ("train", "train.compile", "3", "true or false", None),
    ("train", "train.seed", "lucky", "a whole number", None),
    ("train", "train.keep", "null", "a whole number", None),
    ("train", "resume", "yes", "auto or null", None),
    ("train", "devices", "both", "a whole number or auto", None),
    ("train", "nodes", "one", "a whole number", None),
    ("bench", "rounds", "x", "a whole number", None),
    ("bench", "overwrite", "3", "true or false", None),
    ("cost", "size", "[768]", "2 whole numbers", None),
    ("cost", "size", "large", "2 whole numbers", None),
    ("cost", "classes", "many", "a whole number", None),
    ("cost", "json", "5", "true or false", None),
    ("study FILE", "steps", "all", "a whole number or null", None),
    ("study FILE", "collect", "0.5", "true or false", None),
    ("check rooms", "workers", "x", "a whole number or null", None),
    ("evaluate RUN", "scales", "[1,x]", "numbers", None),
    ("evaluate RUN", "window", "[800]", "2 whole numbers or null", None),
    ("evaluate RUN", "overlap", "third", "a number", None),
    ("evaluate RUN", "workers", "2.5", "a whole number", None),
    ("predict RUN a.png", "focal", "wide", "a number or null", None),
    ("predict RUN a.png", "window", "[1,b]", "2 whole numbers or null", None),
    ("predict RUN a.png", "window", "big", "2 whole numbers or null", None),
    ("predict RUN a.png", "window", "800", "2 whole numbers or null", None),
    ("predict RUN a.png", "scales", "small", "numbers", None),
    ("predict RUN a.png", "fx", "[1]", "a number or null", None),
    ("figures RUN", "count", "x", "a whole number", None),
    ("figures RUN", "pixel", "[1]", "2 whole numbers or null", None),
    ("figures RUN", "samples", "[a]", "whole numbers or null", None),
    ("export RUN a.onnx", "format", "onyx", "onnx, torch or null", "onnx"),
    ("report RUN", "overwrite", "7", "true or false", None),
    ("push RUN x", "private", "7", "true or false", None),
    ("prepare nyudv2 a b", "depth", "fill", "filled or raw", "filled"),
    ("prepare nyudv2 a b", "size", "[1]", "2 whole numbers or null", None),
]


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What goes to stderr of a command that is refused."""
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out
    lines = printed.err.splitlines()
    assert 1 <= len(lines) <= 3
    assert all(len(line) <= 300 for line in lines)
    return printed.err


@pytest.mark.parametrize(("command", "name", "value", "allowed", "near"), WRONG_VALUES)
def test_a_wrong_value_is_answered_in_a_line(
    command: str, name: str, value: str, allowed: str, near: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = answer([*command.split(), f"--{name}={value}"], capsys)
    assert f"{name} must be {allowed}, got " in printed
    got = printed.partition(", got ")[2].partition(" (")[0].partition(", did you")[0]
    whole = got.replace(" ", "").replace("'", "")
    assert whole.lower() in (value.lower(), *value.strip("[]").split(",")) or (got, value) == ("None", "null")
    assert ("did you mean" in printed) == (near is not None)
    assert near is None or f"did you mean {near!r}?" in printed


@pytest.mark.parametrize(("command", "name", "value", "allowed", "near"), WRONG_VALUES)
def test_a_wrong_value_in_a_file_gets_the_same_answer(
    command: str,
    name: str,
    value: str,
    allowed: str,
    near: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    section, _, key = name.rpartition(".")
    (tmp_path / "a.yaml").write_text(f"{section}: {{{key}: {value}}}\n" if section else f"{key}: {value}\n")
    printed = answer([*command.split(), "--config", str(tmp_path / "a.yaml")], capsys)
    assert f"{name} must be {allowed}, got " in printed
    assert near is None or f"did you mean {near!r}?" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --train.learning_rate 1", "unknown setting 'train.learning_rate', did you mean 'train.lr'?"),
        ("train --train.wd 0", "unknown setting 'train.wd', did you mean 'train.weight_decay'?"),
        ("train --train.batch-sizes 3", "unknown setting 'train.batch-sizes', did you mean 'train.batch_size'?"),
        ("train --batchsize 3", "unknown setting 'batchsize', did you mean 'train.batch_size'?"),
        ("train -train.lr 3", "unknown setting '-train.lr', did you mean 'train.lr'?"),
        ("train --Model.Backbone resnet18", "unknown setting 'Model.Backbone', did you mean 'model.backbone'?"),
        ("train --model.depth_inputs x", "unknown setting 'model.depth_inputs'"),
        ("predict RUN a.png --focus 3", "unknown setting 'focus', did you mean 'focal'?"),
        ("predict RUN a.png --ovrwrite", "unknown setting 'ovrwrite', did you mean 'overwrite'?"),
        ("evaluate RUN --scale 1", "unknown setting 'scale', did you mean 'scales'?"),
        ("export RUN x --fromat onnx", "unknown setting 'fromat', did you mean 'format'?"),
        ("train extra", "unrecognized arguments: extra"),
        ("train mine.yaml", "a file of settings is given as --config mine.yaml"),
        ("train --model.conv", "model.conv must be malleable, conv25d, depth_aware or null, got nothing"),
        ("train --train.keep null", "train.keep must be a whole number, got null"),
        ("train --model.invalid=null", "model.invalid must be same, uniform or ignore, got null"),
        ("train --train.lr --train.steps 3", "train.lr must be a number, got nothing"),
        ("train --train 5", "--train: there is no file 5"),
        ("train --train '{lrr: 3}'", "unknown setting 'train.lrr', did you mean 'train.lr'?"),
        ("train --data.crop 96", "data.crop must be 2 whole numbers, got 96"),
        ("train --data.crop 96 96 96", "unrecognized arguments: 96"),
        ("predict RUN a.png --window big", "window must be 2 whole numbers or null, got big"),
        ("predict --window 800 RUN a.png", "window must be 2 whole numbers or null, got 800"),
        ("predict RUN a.png --scales --flip", "scales must be numbers, got nothing"),
        ("train --config", "--config needs a YAML file"),
        ("predict", "the following arguments are required: checkpoint, inputs"),
        ("export RUN", "the following arguments are required: file"),
        ("prepare nyu a b", "dataset must be nyudv2 or sunrgbd, got nyu, did you mean 'nyudv2'?"),
        ("tain", "unknown command 'tain', did you mean 'train'?"),
        ("--verbose", "unknown command '--verbose'"),
    ],
)
def test_other_mistakes_are_answered_in_a_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in answer(shlex.split(words), capsys)


PLAIN = "a number, text (in quotes), list or section"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {keep: null}", "train.keep must be a whole number, got null"),
        ("train: null", "train must hold settings by name, got None"),
        ("train: 5", "train must hold settings by name, got 5"),
        ("data: {crop: null}", "data.crop must be 2 whole numbers, got null"),
        ("data: {crop: [96, null]}", "data.crop must be 2 whole numbers, got None"),
        (
            "train: {lr: !!timestamp 2001-01-01}",
            f"train.lr must be {PLAIN}, got !!timestamp",
        ),
        ("out: 2001-01-01", f"out must be {PLAIN}, got !!timestamp 2001-01-01"),
        ("data: {root: !!binary aGk=}", f"data.root must be {PLAIN}, got !!binary"),
        ("data: {scales: !!set {1, 2}}", f"data.scales must be {PLAIN}, got !!set"),
        (
            "data: {scales: !!omap [a: 1]}",
            f"data.scales must be {PLAIN}, got !!omap",
        ),
        ("model: {stages: [!!timestamp 2001-01-01]}", "model.stages must be"),
        ("out: 5", "out must be text, got 5"),
        ("train: {lr: .nan}", "train.lr must be a number, got NaN"),
        ("train: {lr: {a: 1}}", "train.lr must be a number, got {'a': 1}"),
        ("train: {1: 2}", "unknown setting 'train.1'"),
        ("train: {batch-size: 2}", "unknown setting 'train.batch-size', did you mean 'train.batch_size'?"),
        ("train: {learning_rate: 2}", "unknown setting 'train.learning_rate', did you mean 'train.lr'?"),
        ("trian: {lr: 2}", "unknown setting 'trian', did you mean 'train'?"),
        ("train.lr: 2", "write the setting 'train.lr' as a section, train: {lr: ...}"),
        ("- 1", "must hold settings by name, got a list"),
        ("", "must hold settings by name, got a NoneType"),
        ("train: {lr: [", "is no plain YAML"),
        ("[" * 3000, "is no plain YAML"),
        (LAUGHS, "holds more than 10000 values, aliases written out"),
        ("train: &a {lr: *a}", "holds more than 10000 values, aliases written out"),
    ],
    ids=lambda text: text[:40],
)
def test_files_that_no_setting_can_be_read_from(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(text + "\n")
    assert message in answer(["train", "--config", str(tmp_path / "a.yaml")], capsys)


def test_a_section_may_be_given_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("lr: 0.5\n")
    for value in ("{lr: 0.5}", str(tmp_path / "a.yaml")):
        with pytest.raises(SystemExit, match="0"):
            cli.main(["train", "--train", value, "--print_config"])
        assert "lr: 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "lr"),
    [
        ("--train.lr 0.5 --config a.yaml", 0.5),
        ("--config a.yaml --train.lr 0.5 --config b.yaml", 0.5),
        ("--train.lr 0.5 --train '{lr: 0.25}' --config a.yaml", 0.5),
        ("--train '{lr: 0.25}' --config a.yaml", 0.25),
        ("--config a.yaml --config b.yaml", 0.2),
        ("--config b.yaml --config a.yaml", 0.1),
        ("--train.lr 0.5 --config a.yaml --train.lr 0.6", 0.6),
    ],
)
def test_what_names_less_goes_before_a_file_wherever_it_stands(
    words: str, lr: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("a", 0.1), ("b", 0.2)):
        (tmp_path / f"{name}.yaml").write_text(f"train: {{lr: {value}, steps: 7}}\n")
    (settings,) = resolve(shlex.split(words), get_type_hints(train))
    train_settings = json.loads(settings.removeprefix("--config="))["train"]
    assert (float(train_settings["lr"]), train_settings["steps"]) == (lr, 7)


@pytest.mark.parametrize("words", ["--data.crop 96 64", "--data.crop [96,64]", "--data.crop=[96,64]"])
def test_lists_are_written_with_or_without_brackets(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(
            ["train", *words.split(), "--train.compile", "--model.learnable", "centers", "rebalance", "--print_config"]
        )
    printed = capsys.readouterr().out
    assert "  learnable:\n  - centers\n  - rebalance\n" in printed
    assert "  crop:\n  - 96\n  - 64\n" in printed
    assert "  compile: true\n" in printed


@pytest.mark.parametrize(
    ("words", "settings", "plain"),
    [
        ("run a.png b.png --flip", {"flip": "true"}, ["run", '["a.png", "b.png"]']),
        ("run --out x a.png --focal 5 b.png", {"out": "x", "focal": "5"}, ["run", '["a.png", "b.png"]']),
        ("--scales 0.5 1 run a.png", {"scales": "[0.5,1]"}, ["run", '["a.png"]']),
        ("run a.png --scales [0.5,1] --window [4,5]", {"scales": "[0.5,1]", "window": "[4,5]"}, ["run", '["a.png"]']),
        ("--window 4 5 run a.png --out=x", {"window": "[4,5]", "out": "x"}, ["run", '["a.png"]']),
        ("run --config FILE a.png", {"out": "y"}, ["run", '["a.png"]']),
        ("run --config FILE --out x a.png", {"out": "x"}, ["run", '["a.png"]']),
        ("run --out x --config FILE a.png", {"out": "x"}, ["run", '["a.png"]']),
        ("--only x y --flip run a.png", {"only": '["x", "y"]', "flip": "true"}, ["run", '["a.png"]']),
        ("run --focal -5", {"focal": "-5"}, ["run"]),
        ("run --at-most 3 --at_most=4", {"at_most": "4"}, ["run"]),
        ("run --flip -- --odd.png", {"flip": "true"}, ["--", "run", '["--odd.png"]']),
        ("run", {}, ["run"]),
    ],
)
def test_settings_become_one_file_and_things_without_a_flag_one_list(
    words: str, settings: dict[str, str], plain: list[str], tmp_path: Path
) -> None:
    types = {
        "checkpoint": str,
        "inputs": list[str],
        "out": str,
        "at_most": int,
        "focal": float | None,
        "flip": bool,
        "only": tuple[str, ...],
        "scales": tuple[float, ...],
        "window": tuple[int, int] | None,
    }
    (tmp_path / "a.yaml").write_text("out: y\n")
    first, *rest = resolve(words.replace("FILE", str(tmp_path / "a.yaml")).split(), types)
    assert (json.loads(first.removeprefix("--config=")), rest) == (settings, plain)


@pytest.mark.parametrize(
    ("words", "settings", "plain"),
    [
        ("--json", {"json": "true"}, []),
        ("--json false", {"json": "false"}, []),
        ("--json file", {"json": "true"}, ["file"]),
        ("--size 4 5 file", {"size": "[4,5]"}, ["file"]),
        ("--size [4,5]", {"size": "[4,5]"}, []),
        ("--size 4", {"size": "4"}, []),
        ("--name a b", {"name": "a"}, ["b"]),
    ],
)
def test_arguments_are_written_as_in_a_shell(words: str, settings: dict[str, str], plain: list[str]) -> None:
    first, *rest = resolve(words.split(), {"json": bool, "size": tuple[int, int], "name": str})
    assert (json.loads(first.removeprefix("--config=")), rest) == (settings, plain)


@pytest.mark.parametrize(
    ("words", "value"), [(["--options.pool", ""], ""), (["--options.pool="], ""), (["--options.pool", "null"], None)]
)
def test_an_empty_word_is_text(words: list[str], value: str | None) -> None:
    (settings,) = resolve(words, {"options": dict[str, Any]})
    assert json.loads(settings.removeprefix("--config=")) == {"options": {"pool": value}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a, b", "a, b"),
        ("a}, b", "a}, b"),
        ("a #b", "a #b"),
        ("#5", "#5"),
        ("'5'", "5"),
        ("5", 5),
        ("1e-4", 1e-4),
        ("true", True),
        ("[a, 5]", ["a", 5]),
        ("{a: 5, b: 6}", {"a": 5, "b": 6}),
    ],
)
def test_an_argument_of_a_network_is_one_value(text: str, value: object) -> None:
    (settings,) = resolve(["--options.pool", text], {"options": dict[str, Any]})
    assert json.loads(settings.removeprefix("--config=")) == {"options": {"pool": value}}
