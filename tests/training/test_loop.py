from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import Precision
from torch import Tensor, nn

import malleable as mb
import malleable.inference.evaluate
import malleable.training.loop
from helpers.runs import arguments, make_data, metrics, run, same, start, weights
from malleable import cli
from malleable.data import Sample, SyntheticScenes, open_dataset
from malleable.files import LOCK
from malleable.inference.evaluate import evaluate_network
from malleable.runs.checkpoint import numbered, read_checkpoint
from malleable.runs.config import Config, DataConfig, ModelConfig, TrainConfig, build_network
from malleable.runs.folder import RunFolder, read_config, write_settings
from malleable.runs.folder import _foreign as not_going_on
from malleable.training.loop import image_losses, warn_of_border
from malleable.training.loss import CrossEntropy
from malleable.training.state import State

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert cli.main(arguments(data, out, train__ema=0.9, train__validate_every=4)) == 0
    return out


def test_a_run_leaves_what_it_promises(whole: Path) -> None:
    assert {path.name for path in whole.iterdir()} == {"config.yaml", "metrics.jsonl", "checkpoints", "tensorboard"}
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names == ["best.pt", "step-00000004.pt", "step-00000006.pt"]
    rows = metrics(whole)
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6]
    assert [row["step"] for row in rows if "val/miou" in row] == [4, 6]
    assert {key for key in rows[0] if "layer1.0.conv1" in key} == {
        f"receptive_field/layer1.0.conv1/{name}"
        for name in ("temperature", *(f"center_{k}" for k in range(5)), *(f"scale_{k}" for k in (1, 2, 3)))
    }


def test_a_run_that_died_in_its_last_validation_makes_it_up(whole: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    rows = metrics(out)
    (out / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:-1]))
    again = arguments(data, out, train__ema=0.9, train__validate_every=4)
    assert cli.main([*again, "--resume=auto"]) == 0
    assert metrics(out) == rows
    assert cli.main([*again, "--resume=auto"]) == 0
    assert metrics(out) == rows


def test_metrics_hold_the_receptive_field_of_the_weights(whole: Path) -> None:
    last = [row for row in metrics(whole) if "loss" in row][-1]
    state = weights(whole)
    for k, center in enumerate(state["backbone.model.layer1.0.conv1.centers"].tolist()):
        assert last[f"receptive_field/layer1.0.conv1/center_{k}"] == center
    assert last["receptive_field/layer1.0.conv1/center_0"] != -2  # it is learned


def test_tensorboard_has_scalars_images_and_receptive_fields(whole: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole / "tensorboard")).Reload()
    tags = events.Tags()
    written = {key for row in metrics(whole) for key in row} - {"step"}
    assert set(tags["scalars"]) == written
    assert tags["images"] == ["val/rooms-0-000007", "val/rooms-0-000008"]
    shown = events.Images("val/rooms-0-000007")[-1]
    assert (shown.step, shown.height, shown.width) == (6, 32, 120)  # image, label, prediction


def test_the_validation_is_that_of_the_moving_average(data: Path, whole: Path) -> None:
    checkpoint = read_checkpoint(whole)
    assert checkpoint.ema is not None
    assert not same(dict(checkpoint.ema), dict(checkpoint.model))
    net = build_network(checkpoint.config.model, len(checkpoint.classes), pretrained=False)
    net.load_state_dict(checkpoint.ema)
    results = evaluate_network(net, open_dataset(data, "val"))
    assert metrics(whole)[-1]["val/miou"] == results.miou


def test_the_schedule_is_poly_per_step(whole: Path) -> None:
    rates = [row["lr"] for row in metrics(whole) if "lr" in row]
    assert rates == pytest.approx([0.01 * (1 - step / 6) ** 0.9 for step in (1, 3, 5)])


ADAMW: dict[str, Any] = {
    "train__optimizer": "adamw",
    "train__schedule": "cosine",
    "train__warmup": 4,
    "train__head_lr": 10,
    "train__lr": 1e-3,
    "train__log_every": 1,
    "model__depth_input": "relative",
}


def test_adamw_with_warm_up_and_cosine_goes_on_with_the_same_bits(data: Path, tmp_path: Path) -> None:
    assert cli.main(arguments(data, tmp_path / "whole", **ADAMW)) == 0
    rates = [row["lr"] for row in metrics(tmp_path / "whole") if "lr" in row]
    factors = [(1 + math.cos(math.pi * step / 6)) / 2 * min(1, (step + 1) / 4) for step in range(6)]
    assert rates == pytest.approx([1e-3 * factor for factor in factors])
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for name in ("step-00000006.pt", "best.pt"):
        (tmp_path / "run" / "checkpoints" / name).unlink()
    assert cli.main([*arguments(data, tmp_path / "run", **ADAMW), "--resume", "auto"]) == 0
    assert same(weights(tmp_path / "run"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_any_step_it_ends_with_the_same_bits(data: Path, whole: Path, tmp_path: Path, workers: int) -> None:
    step = random.SystemRandom().randrange(1, 6)
    settings: dict[str, Any] = {"train__ema": 0.9, "train__validate_every": 4, "data__workers": workers}
    command = arguments(data, tmp_path / "run", **settings)
    code, output = run([str(HELPERS / "dying_run.py"), "step", str(step), *command])
    assert code == -signal.SIGKILL, output
    assert cli.main([*command, "--resume", "auto"]) == 0
    assert same(weights(tmp_path / "run"), weights(whole)), f"killed at step {step}"
    mine, other = read_checkpoint(tmp_path / "run"), read_checkpoint(whole)
    assert mine.ema is not None
    assert other.ema is not None
    assert same(dict(mine.ema), dict(other.ema))
    assert [row["step"] for row in metrics(tmp_path / "run")] == [row["step"] for row in metrics(whole)]
    assert metrics(tmp_path / "run")[-1] == metrics(whole)[-1]


def test_killed_while_writing_it_goes_on_from_the_checkpoint_before(data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = arguments(data, out, train__ema=0.9, train__validate_every=4)
    code, output = run([str(HELPERS / "dying_run.py"), "write", "4", *command])
    assert code == -signal.SIGKILL, output
    before, half = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert before == "step-00000002.pt"
    with pytest.warns(UserWarning, match=rf"{half}: the run was stopped while writing"):
        assert cli.main([*command, "--resume", "auto"]) == 0
    assert same(weights(out), weights(whole))


def test_a_damaged_checkpoint_does_not_count_as_the_newest(data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "checkpoints/step-00000006.pt").write_bytes(b"damaged")
    again = arguments(data, out, train__ema=0.9, train__validate_every=4, train__checkpoint_every=1, train__keep=1)
    code, output = run([str(HELPERS / "dying_run.py"), "write", "6", *again, "--resume", "auto"])
    assert code == -signal.SIGKILL, output
    assert "step-00000006.pt is damaged" in output
    with pytest.warns(UserWarning, match="is damaged"):
        assert read_checkpoint(out).step == 5
    with pytest.warns(UserWarning, match="stopped while writing|is damaged"):
        assert cli.main([*again, "--resume", "auto"]) == 0
    assert same(weights(out), weights(whole))


def test_stopped_between_checkpoint_and_validation_it_validates_first(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = arguments(data, tmp_path / "run", train__ema=0.9, train__validate_every=4)

    def die(*_: object) -> None:
        raise RuntimeError("pulled the plug")

    with monkeypatch.context() as patch:
        patch.setattr(malleable.training.loop, "validate", die)
        assert cli.main(command) == 1
    assert read_checkpoint(tmp_path / "run").step == 4
    assert cli.main([*command, "--resume", "auto"]) == 0
    assert [row["step"] for row in metrics(tmp_path / "run") if "val/miou" in row] == [4, 6]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_exits_130(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = arguments(data, tmp_path / "run", train__steps=2000, train__checkpoint_every=2000, data__workers=2)
    process = start(["-m", "malleable", *command], start_new_session=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 2/"):
            break
    os.killpg(process.pid, number)  # terminals and schedulers tell the loading processes too
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 128 + number, rest  # 130 for Ctrl-C
    step = read_checkpoint(tmp_path / "run").step
    assert step >= 2
    assert f"stopped after step {step}; the same command with --resume auto goes on" in rest


def signalling(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> list[str]:
    """Have the first sample of a validation send this process signals; samples that were looked at are listed."""
    seen: list[str] = []

    def probabilities(net: Any, sample: Sample, *rest: Any) -> Tensor:
        seen.append(sample.id)
        for number in numbers if len(seen) == 1 else ():
            signal.raise_signal(number)
        return original(net, sample, *rest)

    original = malleable.inference.evaluate.probabilities
    monkeypatch.setattr(malleable.inference.evaluate, "probabilities", probabilities)
    return seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_validation_which_is_made_after_resuming(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    command = arguments(data, tmp_path / "run", train__steps=2)
    with monkeypatch.context() as patch:
        seen = signalling(patch, number)
        assert cli.main(command) == 128 + number
    assert len(seen) == 1  # of two
    assert "stopped in the validation after step 2; the same command with --resume auto" in capsys.readouterr().err
    assert read_checkpoint(tmp_path / "run").step == 2
    assert cli.main([*command, "--resume", "auto"]) == 0
    assert [row["step"] for row in metrics(tmp_path / "run") if "val/miou" in row] == [2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_run_at_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    signalling(monkeypatch, number, number)
    assert cli.main(arguments(data, tmp_path / "run", train__steps=2)) == 128 + number
    assert "stopped at once" in capsys.readouterr().err


def test_the_last_validation_can_be_left_out(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = arguments(data, tmp_path / "run", train__validate_every=2, train__steps=4, train__validate_last="false")
    assert cli.main(command) == 0
    assert [row["step"] for row in metrics(tmp_path / "run") if "val/miou" in row] == [2]
    assert read_checkpoint(tmp_path / "run").step == 4
    assert cli.main([*command, "--resume", "auto"]) == 0
    assert "has made its 4 steps already" in capsys.readouterr().err


def test_a_validation_shows_how_far_it_has_come(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(data, tmp_path / "run", train__steps=1)) == 0
    assert "tiny/val: 2/2\n" in capsys.readouterr().err


def test_two_runs_in_one_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(data, tmp_path / "run", train__steps=2)

    def changed() -> dict[Path, int]:  # older versions of filelock touch the lock that they cannot have
        files = (path for path in (tmp_path / "run").rglob("*") if path.name != LOCK)
        return {path: path.stat().st_mtime_ns for path in files}

    def interfere(*rest: Any) -> int:
        before = changed()
        codes.append(cli.main([*command, "--resume", "auto"]))
        assert changed() == before
        return original(*rest)

    codes: list[int] = []
    original = malleable.training.loop.validate
    monkeypatch.setattr(malleable.training.loop, "validate", interfere)
    assert cli.main(command) == 0
    assert codes == [1]
    assert f"run is in use by {gethostname()}, process {os.getpid()}, since 2" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_never_saved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def overflow(self: State) -> None:
        original(self)
        if self.step == 4:
            with torch.no_grad():
                next(self.net.parameters()).fill_(math.inf)

    original = State.advance
    monkeypatch.setattr(State, "advance", overflow)
    assert cli.main(arguments(data, tmp_path / "run")) == 1
    assert "the network after step 4 has weights that are not finite" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002.pt"]


@pytest.mark.parametrize("broken", ["weights missing", "momentum of another shape", "momentum NaN", "no optimiser"])
def test_a_checkpoint_that_does_not_fit_its_network_is_passed_over(
    data: Path, whole: Path, tmp_path: Path, broken: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    path = out / "checkpoints/step-00000006.pt"
    content = torch.load(path, weights_only=True)
    momentum = content["training"]["optimizer"]["state"][0]
    if broken == "weights missing":
        content["model"].popitem()
    elif broken == "no optimiser":
        content["training"] = {}
    else:
        momentum["momentum_buffer"] = torch.ones(1) if "shape" in broken else momentum["momentum_buffer"] * math.nan
    torch.save(content, path)
    with pytest.warns(UserWarning, match=r"step-00000006.pt is damaged.*using the one before it"):
        state = restored(out, data)
    before = read_checkpoint(out / "checkpoints/step-00000004.pt")
    assert state.step == 4
    assert same(state.net.state_dict(), dict(before.model))
    momentum = state.checkpoint().training["optimizer"]["state"][0]["momentum_buffer"]
    assert torch.equal(momentum, before.training["optimizer"]["state"][0]["momentum_buffer"])


def restored(out: Path, data: Path) -> State:
    """The state that the run in ``out`` goes on from."""
    config, dataset, fabric = read_config(out), open_dataset(data, "train"), Fabric(accelerator="cpu", devices=1)
    state = State(fabric, config, dataset, pretrained=False)
    RunFolder(out, fabric).restore(config, dataset, state.restore)
    return state


def test_a_checkpoint_is_read_once_on_resume(data: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def load(path: Path, **options: Any) -> Any:
        read.append(path)
        return original(path, **options)

    original = torch.load
    monkeypatch.setattr(torch, "load", load)
    assert restored(whole, data).step == 6
    assert read == [whole / "checkpoints/step-00000006.pt"]


def test_an_error_of_the_machine_is_not_taken_for_a_damaged_checkpoint(
    data: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.optim.SGD, "load_state_dict", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        restored(whole, data)


def test_other_classes_do_not_go_on_with_a_run(data: Path, whole: Path) -> None:
    folder, dataset = RunFolder(whole, Fabric(accelerator="cpu", devices=1)), open_dataset(data, "train")
    dataset.classes = ("wall", "floor")
    with pytest.raises(ValueError, match="the classes were 11 and are 2 others now"):
        folder.restore(read_config(whole), dataset, lambda _: pytest.fail("restored"))


def test_another_list_of_samples_does_not_go_on_with_a_run(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every epoch would be another permutation: samples would come twice, or never."""
    shutil.copytree(data, tmp_path / "data")
    split = tmp_path / "data/splits/train.txt"
    split.write_text("".join(split.read_text().splitlines(keepends=True)[1:]))
    command = arguments(tmp_path / "data", whole, train__ema=0.9, train__validate_every=4)
    assert cli.main([*command, "--resume", "auto"]) == 1
    assert "the list of samples of data.train=train is another one now" in capsys.readouterr().err


def test_a_run_goes_on_when_its_data_moved(data: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    shutil.copytree(data, tmp_path / "data")
    settings = {"train__ema": 0.9, "train__validate_every": 4, "train__steps": 7}
    with pytest.warns(UserWarning, match=r"another recipe: data.root was .* and is .*; train.steps was 6 and is 7"):
        assert cli.main([*arguments(tmp_path / "data", tmp_path / "run", **settings), "--resume", "auto"]) == 0
    assert metrics(tmp_path / "run")[-1]["step"] == 7


def test_a_checkpoint_that_tells_no_samples_goes_on_only_where_its_data_is(data: Path, whole: Path) -> None:
    checkpoint, dataset = read_checkpoint(whole), open_dataset(data, "train")
    old = replace(checkpoint, training={k: v for k, v in checkpoint.training.items() if k != "samples"})
    assert not_going_on(old, checkpoint.config, dataset) == []
    elsewhere = replace(checkpoint.config, data=replace(checkpoint.config.data, root="elsewhere"))
    assert not_going_on(checkpoint, elsewhere, dataset) == []
    assert "data.root was" in not_going_on(old, elsewhere, dataset)[0]


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    for path in (tmp_path / "run/checkpoints").iterdir():
        path.write_bytes(b"damaged") if path.name == "best.pt" else path.unlink()
    command = arguments(data, tmp_path / "run", train__ema=0.9, train__validate_every=4)
    with pytest.warns(UserWarning, match=r"best.pt is damaged"):
        assert cli.main([*command, "--resume", "auto"]) == 1
    assert "none of the checkpoints" in capsys.readouterr().err
    assert (tmp_path / "run/checkpoints/best.pt").read_bytes() == b"damaged"


def test_a_run_whose_checkpoints_are_gone_keeps_its_log(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    command = arguments(data, tmp_path / "run", train__ema=0.9, train__validate_every=4)
    assert cli.main([*command, "--resume", "auto"]) == 1
    assert "holds the log or scores of a run, but none of its checkpoints" in capsys.readouterr().err
    assert metrics(tmp_path / "run") == metrics(whole)


@pytest.mark.parametrize("content", ["# mine\nmodel: {kernels: 3}\n", "# malleable train --config x.yaml\ntrain: {}\n"])
def test_settings_that_no_run_wrote_are_left_alone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "config.yaml").write_text(content)
    assert cli.main([*arguments(data, tmp_path), "--resume", "auto"]) == 1
    assert "config.yaml was not written by a run, which would replace it" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == content


def test_data_without_labels_is_refused(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data/labels").rename(tmp_path / "data/label")
    assert cli.main(arguments(tmp_path / "data", tmp_path / "run")) == 1
    assert "has no labels, so nothing can be learned or scored there; put them into labels/" in capsys.readouterr().err
    assert cli.main(["evaluate", str(whole), "--dataset", str(tmp_path / "data"), "--out", str(tmp_path / "x")]) == 1
    error = capsys.readouterr().err
    assert "tiny/val has no labels, so there are no scores" in error
    assert "/2" not in error  # nothing was measured before


def logged(out: Path, step: int) -> RunFolder:
    """A run that saves every second step and has logged ``step``, but has no checkpoint."""
    write_settings(out, replace(Config(), train=TrainConfig(checkpoint_every=2)))
    (out / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1.0}}\n')
    return RunFolder(out, Fabric(accelerator="cpu", devices=1))


def test_crops_that_are_mostly_border_are_told_of_once(data: Path, tmp_path: Path) -> None:
    large = arguments(data, tmp_path / "out", data__crop="[96,96]", data__scales="[0.5,2]", train__steps=1)
    with pytest.warns(UserWarning, match=r"data.crop=\[96, 96\] is larger .* 44% .* --data.crop 32 40") as told:
        assert cli.main(large) == 0
    assert len([warning for warning in told if "data.crop" in str(warning.message)]) == 1


@pytest.mark.parametrize(
    "data",
    [DataConfig(crop=(64, 96), scales=(0.5, 2)), DataConfig(crop=(80, 80), scales=(2,)), DataConfig(crop=(32, 40))],
    ids=["as high at the largest scale", "as wide", "as large"],
)
def test_crops_that_an_image_fills_in_one_direction_are_fine(
    data: DataConfig, recwarn: pytest.WarningsRecorder
) -> None:
    warn_of_border(data, SyntheticScenes("rooms", size=(32, 40), length=1)[0])
    assert not recwarn


def test_a_log_beyond_the_first_checkpoint_is_kept_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds the log or scores of a run, but none of its checkpoints"):
        logged(tmp_path, 3).started(resume=True)


def test_a_run_that_was_killed_while_it_wrote_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    assert not logged(tmp_path, 2).started(resume=True)


def test_the_best_checkpoint_is_marked_whatever_a_callback_does(data: Path, tmp_path: Path) -> None:
    def stop(row: Mapping[str, float]) -> None:
        if "val/miou" in row:
            raise RuntimeError("pruned")

    settings = {"model": {"backbone": "resnet10t", "pretrained": False, "stages": [2]}}
    settings |= {"data": {"root": data, "crop": [32, 32], "workers": 0}}  # a path will do
    settings |= {"train": {"steps": 1, "batch_size": 2, "log_every": 1}}
    with pytest.raises(RuntimeError, match="pruned"):
        mb.fit(settings, tmp_path / "run", callback=stop, accelerator="cpu")
    assert read_checkpoint(tmp_path / "run/checkpoints/best.pt").step == 1


@pytest.mark.filterwarnings("ignore:.*(is damaged|another recipe)")
@pytest.mark.parametrize("damaged", [None, 2, 4])
def test_the_best_checkpoint_is_enough_to_validate_and_stays_good(
    data: Path, whole: Path, tmp_path: Path, damaged: int | None
) -> None:
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(whole / "checkpoints/step-00000004.pt", folder / "best.pt")
    if damaged is not None:
        (folder / f"step-{damaged:08d}.pt").write_bytes(b"damaged")
    command = arguments(data, tmp_path / "run", train__ema=0.9, train__validate_every=4, train__steps=4)
    assert cli.main([*command, "--resume", "auto"]) == 0
    assert read_checkpoint(folder / "best.pt").step == 4


def test_a_run_may_go_on_in_half_precision(data: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scaler would be given is empty in a checkpoint of whole precision, which GradScaler refuses."""
    monkeypatch.setattr(Precision, "load_state_dict", lambda self, state: pytest.fail(f"was given {state}"))
    assert restored(whole, data).step == 6


def test_what_a_killed_run_left_half_written_goes_when_it_resumes(data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for name in ("config.{}.part.yaml", "metrics.{}.part.jsonl", "checkpoints/best.{}.part.pt"):
        (out / name.format("0a" * 16)).touch()
    mine = out / "notes.part.txt"
    mine.touch()
    with pytest.warns(UserWarning, match="stopped while writing"):
        assert RunFolder(out, Fabric(accelerator="cpu", devices=1)).started(resume=True)
    assert list(out.rglob("*.part*")) == [mine]


def test_a_loss_that_is_no_number_stops_with_step_and_sample(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def spoilt(self: CrossEntropy, logits: Tensor, label: Tensor) -> Tensor:
        seen.append(len(label))
        factor = torch.tensor([1.0, math.nan if len(seen) == 4 else 1.0])
        return original(self, logits, label) * factor

    original = CrossEntropy.__call__
    monkeypatch.setattr(CrossEntropy, "__call__", spoilt)
    assert cli.main(arguments(data, tmp_path / "run")) == 1
    from malleable.data import StepSampler

    second = StepSampler(7, 2, 6).draws(3)[1].item  # the fourth step is step 3, its second sample the spoilt one
    error = capsys.readouterr().err
    assert f"step 3: the loss is nan; samples {open_dataset(data, 'train').ids[second]}." in error
    assert "step-00000002.pt" in error
    kept = read_checkpoint(tmp_path / "run")
    assert kept.step == 2
    assert all(torch.isfinite(tensor).all() for tensor in kept.model.values())


@pytest.mark.filterwarnings("ignore:You passed `Fabric")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])  # on a CPU the second one has no scaler either
def test_a_gradient_that_is_no_number_never_reaches_the_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    def steep(self: CrossEntropy, logits: Tensor, label: Tensor) -> Tensor:
        return original(self, logits, label) + (logits * 0).sum().sqrt()  # 0, with an infinite slope

    original = CrossEntropy.__call__
    monkeypatch.setattr(CrossEntropy, "__call__", steep)
    assert cli.main(arguments(data, tmp_path / "run", train__precision=precision)) == 1
    assert "step 0: the gradient is not finite" in capsys.readouterr().err
    assert not numbered(tmp_path / "run" / "checkpoints")


def test_a_full_disk_ends_the_run_with_a_sentence(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = torch.save

    def full(content: Any, file: Any) -> None:
        if content["step"] == 4:
            file.write(b"PK half of it")
            raise OSError(28, "No space left on device")
        save(content, file)

    monkeypatch.setattr(torch, "save", full)
    assert cli.main(arguments(data, tmp_path / "run")) == 1
    assert "no space left for the checkpoint" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002.pt"]


def test_a_run_is_never_overwritten(data: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert cli.main(arguments(data, whole)) == 1
    assert "already holds a run" in (error := capsys.readouterr().err)
    assert "--resume auto" in error
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_another_network_does_not_go_on_with_a_run(data: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments(data, whole, model__kernels=1), "--resume", "auto"]) == 1
    assert "model.kernels was 3 and is 1" in capsys.readouterr().err


def test_a_finished_run_is_left_alone(data: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = arguments(data, whole, train__ema=0.9, train__validate_every=4)
    assert cli.main([*command, "--resume", "auto"]) == 0
    assert "has made its 6 steps already" in capsys.readouterr().err


def test_accumulated_parts_are_one_batch(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: x)  # its mask follows the order of calls
    common: dict[str, Any] = {"train__freeze_norm": "true", "train__batch_size": 4, "train__steps": 3}
    for parts in (1, 2):
        assert cli.main(arguments(data, tmp_path / f"{parts}", **common, train__accumulate=parts)) == 0
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    assert max(float((one[key] - two[key]).abs().max()) for key in one) < 1e-6


def test_the_other_switches_run(data: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model__conv": "null",
        "train__steps": 2,
        "train__precision": "bf16-mixed",
        "train__channels_last": "true",
        "train__clip": 1.0,
        "train__loss": "bootstrapped",
    }
    assert cli.main(arguments(data, tmp_path / "run", **settings)) == 0
    assert all(tensor.dtype != torch.bfloat16 for tensor in weights(tmp_path / "run").values())


def test_mixed_precision_leaves_depth_as_it_is(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fabric casts what a network is called with, and a depth of 8 bits has surfaces in steps of a centimetre."""
    seen: set[tuple[torch.dtype, ...]] = set()

    def watch(self: mb.MalleableConv2d, x: Tensor, geometry: mb.Geometry) -> Tensor:
        y = original(self, x, geometry)
        seen.add((geometry.depth.dtype, geometry.focal.dtype, y.dtype))
        return y

    original = mb.MalleableConv2d.forward
    monkeypatch.setattr(mb.MalleableConv2d, "forward", watch)
    settings = {"train__steps": 1, "train__precision": "bf16-mixed", "train__validate_last": "false"}
    assert cli.main(arguments(data, tmp_path / "run", **settings)) == 0
    assert seen == {(torch.float32, torch.float32, torch.bfloat16)}


def test_the_released_network_is_trained_as_its_authors_do(data: Path, tmp_path: Path) -> None:
    settings = {"merge": "released", "width": 8, "channels": "[8,8,8,8]", "invalid": "uniform"}
    recipe = {"auxiliary": 0.4, "norm_momentum": 0.01, "hold_middle": "true", "lr": 0.1}
    chosen = {f"model__{key}": value for key, value in settings.items()}
    chosen |= {f"train__{key}": value for key, value in recipe.items()}
    assert cli.main(arguments(data, tmp_path / "run", **chosen)) == 0
    trained = mb.load(tmp_path / "run")
    for layer in trained.net.backbone.layers().values():
        assert layer.centers[2] == 0
        assert (layer.centers[[0, 1, 3, 4]] != torch.tensor([-2.0, -1.0, 1.0, 2.0])).all()
    predicted = trained.predict(np.zeros((32, 40, 3), np.uint8), np.ones((32, 40), np.float32), focal=30.0)
    assert predicted.labels.shape == (32, 40)


def test_the_momentum_of_norms_can_be_set(data: Path, tmp_path: Path) -> None:
    config = Config(ModelConfig("resnet10t", pretrained=False), train=TrainConfig(norm_momentum=0.01))
    state = State(Fabric(accelerator="cpu", devices=1), config, open_dataset(str(data), "train"), pretrained=False)
    assert {m.momentum for m in state.net.modules() if isinstance(m, nn.BatchNorm2d)} == {0.01}


def test_the_auxiliary_loss_is_added_with_its_weight() -> None:
    logits, early, label = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    state = SimpleNamespace(config=Config(ModelConfig(merge="released"), train=TrainConfig(auxiliary=0.4)))
    state.model = lambda image, depth, focal, auxiliary: (logits, early) if auxiliary else logits
    part = SimpleNamespace(depth=None, focal=None, label=label)
    loss = CrossEntropy()
    expected = loss(logits, label) + 0.4 * loss(early, label)
    torch.testing.assert_close(image_losses(state, logits, part, loss), expected)  # type: ignore[arg-type]


def test_frozen_norms_keep_their_statistics_also_after_validation(data: Path, tmp_path: Path) -> None:
    command = arguments(data, tmp_path / "run", train__freeze_norm="true", train__validate_every=1, train__steps=3)
    assert cli.main(command) == 0
    means = [value for key, value in weights(tmp_path / "run").items() if key.endswith("running_mean")]
    assert means
    assert not any(mean.any() for mean in means)


def test_receptive_fields_have_a_rate_of_their_own(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, float]] = []

    def watch(self: State) -> None:
        original(self)
        seen.append({group["name"]: group["lr"] for group in self.optimizer.param_groups})

    original = State.set_lr
    monkeypatch.setattr(State, "set_lr", watch)
    settings: dict[str, Any] = {"train__receptive_field_lr": 10, "train__steps": 2}
    assert cli.main(arguments(data, tmp_path / "run", **settings)) == 0
    for step, rates in enumerate(seen):
        assert rates["decay"] == pytest.approx(0.01 * (1 - step / 2) ** 0.9)
        assert rates["receptive_field"] == pytest.approx(10 * rates["decay"])


def test_single_images_under_batch_norm_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(data, tmp_path / "run", train__accumulate=2)) == 1
    assert "batch norm needs at least 2 images" in capsys.readouterr().err
    assert cli.main(arguments(data, tmp_path / "run", train__batch_size=3, train__accumulate=2)) == 1
    assert "must be a multiple of 1 processes × train.accumulate=2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()  # nothing was begun


def test_synchronised_norms_keep_fused_activations() -> None:
    from timm.layers.norm_act import BatchNormAct2d, convert_sync_batchnorm

    net = mb.deeplabv3plus("mobilenetv3_small_050", 3, conv=None, pretrained=False, output_stride=16)
    before = sum(isinstance(module, BatchNormAct2d) for module in net.modules())
    keys = list(net.state_dict())
    after = convert_sync_batchnorm(net)  # type: ignore[no-untyped-call]
    assert before
    assert list(after.state_dict()) == keys
    assert sum(type(module).__name__ == "SyncBatchNormAct" for module in after.modules()) == before


def test_from_python_every_row_is_handed_to_a_callback(data: Path, tmp_path: Path) -> None:
    rows: list[Mapping[str, float]] = []
    settings = {
        "model": {"backbone": "resnet10t", "pretrained": False, "stages": [2]},
        "data": {"root": str(data), "crop": (32, 32), "workers": 0},
        "train": {"steps": 2, "batch_size": 2, "log_every": 1},
    }
    mb.fit(settings, tmp_path / "run", callback=rows.append, accelerator="cpu")
    assert rows == metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 2]
    assert "loss" in rows[0]
    assert "val/miou" in rows[2]
    with pytest.raises(ValueError, match="already holds a run"):
        mb.fit(settings, tmp_path / "run", accelerator="cpu")
    with pytest.raises(ValueError, match=r"unknown setting 'train.learning_rate', did you mean 'train.lr'"):
        mb.fit({"train": {"learning_rate": 1}}, tmp_path / "other")


def test_another_recipe_is_what_a_run_goes_on_with(data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    recipe: dict[str, Any] = {"train__ema": 0.9, "train__steps": 7, "train__weight_decay": 0.5, "train__momentum": 0}
    with pytest.warns(UserWarning, match=r"weight_decay was 0\.0001 and is 0\.5"):
        assert cli.main([*arguments(data, out, **recipe), "--resume", "auto"]) == 0
    groups = read_checkpoint(numbered(out / "checkpoints", 7)[0]).training["optimizer"]["param_groups"]
    assert {group["name"]: (group["weight_decay"], group["momentum"]) for group in groups} == {
        "decay": (0.5, 0.0),
        "no_decay": (0.0, 0.0),
        "receptive_field": (0.0, 0.0),
    }


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("train__optimizer", "adamw", "train.optimizer was 'sgd' and is 'adamw'"),
        ("train__head_lr", 10, "train.head_lr was 1.0 and is 10.0"),
    ],
)
def test_another_optimiser_does_not_go_on_with_a_run(
    setting: str, value: Any, message: str, data: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments(data, whole, train__ema=0.9, **{setting: value}), "--resume", "auto"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("now", "fits"), [(0.0, False), (0.2, True)])
def test_an_auxiliary_loss_that_begins_or_ends_does_not_go_on_with_a_run(
    now: float, fits: bool, data: Path, whole: Path
) -> None:
    """The optimiser has its classifier or not; another weight of it is another recipe only."""
    before, after = (
        Config(ModelConfig(merge="released"), train=TrainConfig(auxiliary=weight)) for weight in (0.4, now)
    )
    checkpoint = replace(read_checkpoint(whole), config=before)
    assert not_going_on(checkpoint, after, open_dataset(data, "train")) == (
        [] if fits else ["train.auxiliary was 0.4 and is 0.0"]
    )


def test_a_file_of_settings_is_not_settings(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"config must be settings by section, got str; .* malleable train --config FILE"
    ):
        mb.fit("mine.yaml", tmp_path / "run")  # type: ignore[arg-type]
