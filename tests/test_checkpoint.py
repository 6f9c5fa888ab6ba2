from __future__ import annotations

import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import malleable.files
from malleable.checkpoint import Checkpoint, mark_best, numbered, prune, read_checkpoint, write_checkpoint
from malleable.config import Config, ModelConfig


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
