from __future__ import annotations

import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import malleable.files
from malleable.runs.checkpoint import Checkpoint, mark_best, numbered, prune, read_checkpoint, write_checkpoint
from malleable.runs.config import Config, ModelConfig


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        config=Config(model=ModelConfig(backbone="resnet18", centers=(-1.0, 0.0, 1.0), kernels=1)),
        step=step,
        model={"weight": torch.full((400,), float(step))},
        ema=None,
        classes=("wall", "floor"),
        palette=((1, 2, 3), (4, 5, 6)),
        dataset="tiny",
        training={"optimizer": {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}},
        versions={"torch": "2"},
        places=("encoder.layer1.0.conv1",),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    write_checkpoint(folder, checkpoint(1))
    write_checkpoint(folder, checkpoint(2))
    return folder


def test_round_trip(folder: Path) -> None:
    read, wrote = read_checkpoint(folder / "step-00000002.pt"), checkpoint(2)
    assert torch.equal(read.model["weight"], wrote.model["weight"])
    assert torch.equal(read.training["optimizer"]["state"][0]["momentum_buffer"], torch.ones(2))
    assert replace(read, model={}, training={}) == replace(wrote, model={}, training={})


def test_a_run_and_its_folder_give_the_newest(folder: Path) -> None:
    assert read_checkpoint(folder).step == read_checkpoint(folder.parent).step == 2


def _content(**parts: object) -> dict[str, object]:
    """A checkpoint's file of step 3, with some parts of it replaced."""
    good = checkpoint(3)
    return {
        "format": 1,
        "config": good.config.to_dict(),
        "step": 3,
        "model": dict(good.model),
        "ema": None,
        "classes": list(good.classes),
        "palette": [list(colour) for colour in good.palette],
        "dataset": good.dataset,
        "training": good.training,
        "versions": good.versions,
        **parts,
    }


def _saved(**parts: object) -> Callable[[Path], None]:
    return lambda path: torch.save(_content(**parts), path)


def _bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))


def _nested(path: Path, depth: int = 10**5) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
        archive.writestr("archive/version", "3")


def _unreadable(path: Path) -> None:
    path.symlink_to("/proc/self/mem")  # a file for all that stat says, but reading fails, even for root


def _weights(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"weight": torch.tensor([1.0]), "norm.running_var": torch.tensor(values, dtype=dtype)}


BROKEN: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
    "unreadable": _unreadable,
    "zip bomb": _bomb,
    "huge tensor": _saved(model={"weight": torch.zeros(1).expand(10**12)}),
    "deep list": _nested,
    "step is text": _saved(step="3"),
    "step is negative": _saved(step=-3),
    "model is a list": _saved(model=[torch.zeros(1)]),
    "model holds numbers": _saved(model={"weight": 1.0}),
    "ema is a number": _saved(ema=0.9),
    "settings unknown": _saved(config={"model": {"colour": 1}, "data": {}, "train": {}}),
    "settings are a list": _saved(config=[1]),
    "classes are numbers": _saved(classes=[1, 2]),
    "places are numbers": _saved(places=[1]),
    "palette is flat": _saved(palette=[1, 2]),
    "data set is none": _saved(dataset=None),
    "training is none": _saved(training=None),
    "versions are text": _saved(versions="2"),
    "format is a list": _saved(format=[1]),
    "weights NaN": _saved(model=_weights(math.nan)),
    "weights infinite": _saved(model=_weights(math.inf, dtype=torch.bfloat16)),
    "average infinite": _saved(ema=_weights(-math.inf)),
}


@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN)
def test_whatever_is_broken_is_passed_over_with_one_line(folder: Path, make: Callable[[Path], object]) -> None:
    path = folder / "step-00000003.pt"
    make(path)
    with pytest.warns(UserWarning, match=re.escape(f"{path} ")) as caught:
        assert read_checkpoint(folder).step == 2
    (message,) = [str(warning.message) for warning in caught]
    assert "\n" not in message
    assert message.endswith("using the one before it")


def test_the_file_that_is_broken_in_the_other_tests_is_good_otherwise(folder: Path) -> None:
    _saved(model=_weights(0.5) | {"count": torch.tensor([3])})(folder / "step-00000003.pt")
    assert read_checkpoint(folder).step == 3


def test_a_folder_in_the_place_of_a_checkpoint_is_moved_aside(folder: Path) -> None:
    for name in ("step-00000003.pt", "best.pt"):
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match="was a folder"):
        mark_best(write_checkpoint(folder, checkpoint(3)))
    assert read_checkpoint(folder / "best.pt").step == read_checkpoint(folder).step == 3
    assert len(list(folder.glob("*/notes.txt"))) == 2


def test_pruning_leaves_folders(folder: Path) -> None:
    (folder / "step-00000000.pt").mkdir()
    prune(folder, 1, step=2)
    assert [path.name for path in numbered(folder)] == ["step-00000002.pt", "step-00000000.pt"]


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty"])
def test_a_damaged_file_is_passed_over_with_a_warning(folder: Path, damage: str) -> None:
    newest = folder / "step-00000002.pt"
    content = bytearray(newest.read_bytes())
    if damage == "one bit":
        content[content.index(torch.full((400,), 2.0).numpy().tobytes()) + 800] ^= 1
    newest.write_bytes({"truncated": content[: len(content) // 2], "one bit": content, "empty": b""}[damage])
    with pytest.warns(UserWarning, match="step-00000002.pt is damaged.*using the one before"):
        assert read_checkpoint(folder).step == 1
    with pytest.raises(ValueError, match="is damaged or no checkpoint"):
        read_checkpoint(newest)


def test_a_half_written_file_is_not_a_checkpoint(folder: Path) -> None:
    (folder / "step-00000003.0a1b.part.pt").write_bytes((folder / "step-00000002.pt").read_bytes()[:100])
    assert read_checkpoint(folder).step == 2


def test_the_best_stays_when_its_step_is_pruned(folder: Path) -> None:
    mark_best(folder / "step-00000001.pt")
    prune(folder, 1, step=2)
    assert [path.name for path in numbered(folder)] == ["step-00000002.pt"]
    assert read_checkpoint(folder / "best.pt").step == 1


def test_checkpoints_of_later_steps_do_not_count(folder: Path) -> None:
    write_checkpoint(folder, checkpoint(9))
    prune(folder, 1, step=2)
    assert [path.name for path in numbered(folder)] == ["step-00000009.pt", "step-00000002.pt"]
    assert [path.name for path in numbered(folder, 2)] == ["step-00000002.pt"]


def test_without_links_the_best_is_a_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    mark_best(folder / "step-00000001.pt")
    assert read_checkpoint(folder / "best.pt").step == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_said_and_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(path.name for path in folder.iterdir())
    monkeypatch.setattr(malleable.files, "open", lambda *_: Path("/dev/full").open("wb"), raising=False)  # noqa: SIM115
    with pytest.raises(OSError, match=r"no space left for the checkpoint .*step-00000003.pt.*--resume auto"):
        write_checkpoint(folder, checkpoint(3))
    assert sorted(path.name for path in folder.iterdir()) == before


class Harmful:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("archive", [True, False], ids=["torch file", "bare pickle"])
def test_code_in_a_file_is_not_run(tmp_path: Path, archive: bool) -> None:
    trace, path = tmp_path / "was here", tmp_path / "step-00000001.pt"
    if archive:
        torch.save({"format": 1, "model": Harmful(trace)}, path)
    else:
        path.write_bytes(pickle.dumps(Harmful(trace)))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_checkpoint(path)
    assert not trace.exists()
    torch.load(path, weights_only=False) if archive else pickle.loads(path.read_bytes())
    assert trace.exists()  # it would have run


def test_other_files_are_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match="no checkpoint of malleable train"):
        read_checkpoint(tmp_path / "foreign.pt")
    torch.save({"format": 1, "step": 3}, tmp_path / "short.pt")
    with pytest.raises(ValueError, match=r"short\.pt is no checkpoint of malleable train; it has no 'config'"):
        read_checkpoint(tmp_path / "short.pt")
    with pytest.raises(FileNotFoundError, match="holds no good checkpoint"):
        read_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a checkpoint nor a folder"):
        read_checkpoint(tmp_path / "absent")


def test_a_checkpoint_that_somebody_reads_is_kept_until_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows a file that is open elsewhere cannot be deleted."""
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:08d}.pt").touch()

    def refuse(_: Path) -> None:
        raise PermissionError("used by another process")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        prune(tmp_path, keep=1, step=3)
    assert len(numbered(tmp_path)) == 3
    prune(tmp_path, keep=1, step=3)
    assert [path.name for path in numbered(tmp_path)] == ["step-00000003.pt"]
