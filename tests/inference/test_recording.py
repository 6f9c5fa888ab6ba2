"""Recordings for the Rerun viewer, read back with its own reader."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.toys import scenes
from malleable import cli
from malleable.data import Sample
from malleable.inference.prediction import Prediction
from malleable.inference.recording import recorded

DATA = scenes()


def prediction_of(sample: Sample) -> Prediction:
    """The true class of every pixel, and class 0 where there is none."""
    known = torch.where(sample.label < len(DATA.classes), sample.label, 0).as_subclass(torch.Tensor)
    likely = torch.nn.functional.one_hot(known, len(DATA.classes)).permute(2, 0, 1).float()
    return Prediction(known.numpy(), likely.numpy(), sample.image.permute(1, 2, 0).numpy(), DATA.palette)


def test_camera_depth_colours_and_labels_come_back(tmp_path: Path) -> None:
    pytest.importorskip("rerun")
    reader = pytest.importorskip("rerun.chunk").RrdReader
    path, written = tmp_path / "new" / "out.rrd", []
    with recorded(lambda sample, _: written.append(sample.id), str(path), DATA.classes, DATA.palette) as write:
        for index in range(2):
            write(DATA[index], prediction_of(DATA[index]))
    assert written == DATA.ids[:2]
    assert list(path.parent.iterdir()) == [path]
    found: dict[str, list[object]] = {}
    for chunk in reader(path).stream().to_chunks():
        batch = chunk.to_record_batch()
        for name in (name for name in batch.schema.names if ":" in name):  # the others are rows and times
            found.setdefault(f"{chunk.entity_path} {name.rpartition(':')[2]}", []).extend(batch[name].to_pylist())
    for index in range(2):
        sample, depth = DATA[index], DATA[index].depth.numpy()[0]
        shown = {name: np.array(values[index][0]) for name, values in found.items() if name.startswith("/world/")}
        assert found["/id text"][index] == [sample.id]
        lens = shown["/world/camera image_from_camera"].reshape(3, 3).T
        assert lens[0, 0] == pytest.approx(sample.camera.fx)
        assert lens[0, 2] == pytest.approx(sample.camera.cx + 0.5)
        pixels = sample.image.permute(1, 2, 0).numpy()
        assert (shown["/world/camera/image buffer"].astype(np.uint8) == pixels.ravel()).all()
        assert (shown["/world/camera/depth buffer"].astype(np.uint8).tobytes()) == depth.tobytes()
        labels = prediction_of(sample).labels
        assert (shown["/world/camera/labels buffer"] == labels.ravel()).all()
        assert (np.array(found["/world/labels class_ids"][index]) == labels[depth > 0]).all()
        points = np.array(found["/world/colours positions"][index])
        assert np.allclose(points[:, 2], depth[depth > 0])


def test_without_a_path_nothing_is_recorded() -> None:
    def write(*_: object) -> None:
        raise AssertionError

    with recorded(write, None, DATA.classes, DATA.palette) as same:
        assert same is write


def test_a_recording_is_overwritten_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "out.rrd"
    path.write_text("mine")
    with (
        pytest.raises(FileExistsError, match=r"out.rrd exists; choose another name or --overwrite"),
        recorded(print, str(path), DATA.classes, DATA.palette),
    ):
        pass
    assert path.read_text() == "mine"


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    with (
        pytest.raises(ValueError, match="pip install rerun-sdk"),
        recorded(print, str(tmp_path / "out.rrd"), DATA.classes, DATA.palette),
    ):
        pass


def test_resume_and_rerun_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predict", "x", str(tmp_path), "--resume", "true", "--rerun", "out.rrd"]) == 1
    assert "leave one out" in capsys.readouterr().err
