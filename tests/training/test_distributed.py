from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lightning_fabric.accelerators.cuda import CUDAAccelerator
from lightning_fabric.accelerators.mps import MPSAccelerator

from helpers.runs import arguments, make_data, metrics, run, weights
from malleable import cli
from malleable.data import open_dataset
from malleable.inference.evaluate import evaluate_network
from malleable.runs.checkpoint import read_checkpoint
from malleable.runs.config import build_network
from malleable.training.distributed import launch

WITHOUT_DROPOUT = str(Path(__file__).parents[1] / "helpers" / "without_dropout.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", WITHOUT_DROPOUT]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "tiny")


@pytest.mark.parametrize(
    ("loss", "launcher"),
    [
        ("cross_entropy", "torchrun"),
        pytest.param("bootstrapped", "fabric", marks=pytest.mark.slow),
    ],
)
def test_two_processes_learn_what_one_does(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, launcher: str
) -> None:
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)  # a mask belongs to a process
    settings = {"train__steps": 20, "train__batch_size": 4, "train__freeze_norm": "true", "train__log_every": 10}
    settings |= {"train__loss": loss, "train__checkpoint_every": 20}
    assert cli.main(arguments(data, tmp_path / "one", **settings)) == 0
    command = arguments(data, tmp_path / "two", **settings)
    code, output = run([*TORCHRUN, *command] if launcher == "torchrun" else [WITHOUT_DROPOUT, *command, "--devices=2"])
    assert code == 0, output

    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert max(float((one[key] - two[key]).abs().max()) for key in one) < 1e-5
    start = build_network(read_checkpoint(tmp_path / "one").config.model, 11).state_dict()
    assert max(float((one[key] - start[key]).abs().max()) for key in one) > 1e-2  # there was something to learn
    for mine, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert mine["step"] == other["step"]
        assert mine.get("loss", 0) == pytest.approx(other.get("loss", 0), abs=1e-5)

    net = build_network(read_checkpoint(tmp_path / "two").config.model, 11, pretrained=False)
    net.load_state_dict(two)
    results = evaluate_network(net, open_dataset(data, "val"))
    last = metrics(tmp_path / "two")[-1]
    assert (last["val/miou"], last["val/pixel_accuracy"]) == (results.miou, results.pixel_accuracy)  # reduced exactly


def test_processes_score_the_network_that_is_saved(data: Path, tmp_path: Path) -> None:
    """On a CPU each has batch norms of its own; only the first one's are kept."""
    command = arguments(data, tmp_path / "two", train__steps=4, train__batch_size=4, train__ema=0.3, train__lr=0.1)
    code, output = run([*TORCHRUN, *command])
    assert code == 0, output
    saved = read_checkpoint(tmp_path / "two")
    net = build_network(saved.config.model, 11, pretrained=False)
    net.load_state_dict(saved.ema or {})
    results = evaluate_network(net, open_dataset(data, "val"))
    last = metrics(tmp_path / "two")[-1]
    assert (last["val/miou"], last["val/pixel_accuracy"]) == (results.miou, results.pixel_accuracy)


def test_on_cpu_processes_say_once_that_statistics_are_their_own(data: Path, tmp_path: Path) -> None:
    command = arguments(data, tmp_path / "two", train__steps=1, train__batch_size=4, model__conv="null")
    code, output = run([*TORCHRUN, *command])
    assert code == 0, output
    assert output.count("the statistics of batch norm are those of each process alone") == 1


def test_a_signal_to_one_process_ends_the_validation_of_all(data: Path, tmp_path: Path) -> None:
    command = arguments(data, tmp_path / "two", train__steps=1, train__batch_size=4, model__conv="null")
    dying = str(Path(__file__).parents[1] / "helpers" / "dying_run.py")
    code, output = run([dying, "validate", "1", *command, "--devices=2"])
    assert code == 143, output
    assert output.count("stopped in the validation after step 1") == 1
    assert read_checkpoint(tmp_path / "two").step == 1
    assert not any("val/miou" in row for row in metrics(tmp_path / "two"))


def test_an_error_of_the_first_process_ends_all(data: Path, tmp_path: Path) -> None:
    (tmp_path / "two" / "checkpoints").mkdir(parents=True)
    code, output = run([*TORCHRUN, *arguments(data, tmp_path / "two", train__batch_size=4)])
    assert code == 1
    assert output.count("already holds a run") == 2  # both say it; neither waits for the other


@pytest.mark.parametrize("name", ["gpu", "cuda", "tpu", "cpus"])
def test_an_accelerator_that_is_not_there_is_named_with_those_that_are(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: False)
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: False)
    assert cli.main(arguments(data, tmp_path / "run", accelerator=name)) != 0
    assert f"accelerator must be one that is here, cpu, or auto, got '{name}'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_number_of_devices_that_cannot_be_is_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(data, tmp_path / "run", devices=-1)) != 0
    assert "devices must be at least 1, or auto, got -1" in capsys.readouterr().err


def test_a_notebook_is_told_that_it_cannot_start_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ValueError, match="devices=2 cannot be started from a notebook"):
        launch("cpu", 2, 1, "32-true")
    assert launch("cpu", 1, 1, "32-true").world_size == 1
