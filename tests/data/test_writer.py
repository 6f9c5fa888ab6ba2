from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from malleable.data import FolderDataset, FolderWriter, SyntheticScenes


def test_what_is_written_is_read_back(tmp_path):
    scenes = SyntheticScenes("rooms", size=(24, 32), length=3)
    writer = FolderWriter(tmp_path / "out", "scenes", scenes.classes, scenes.palette, camera=scenes[1].camera)
    for index in range(3):
        assert not writer.has(scenes.ids[index])
        writer.write(scenes[index])
        assert writer.has(scenes.ids[index])
    assert not (tmp_path / "out").exists()
    writer.finish({"train": scenes.ids})
    data = FolderDataset(tmp_path / "out", "train")
    assert (data.classes, data.palette, data.ids) == (scenes.classes, scenes.palette, scenes.ids)
    for written, read in ((scenes[index], data[index]) for index in range(3)):
        assert torch.equal(written.image, read.image)
        assert torch.equal(written.label, read.label)
        assert (written.depth - read.depth).abs().max() <= 1.01e-4
        assert written.camera == read.camera  # each scene has a focal length of its own


def test_depth_that_does_not_fit_is_invalid(tmp_path):
    scene = SyntheticScenes("streets", size=(24, 32), length=1)[0]
    writer = FolderWriter(tmp_path / "out", "far", list("abcdefghij"), [(0, 0, index) for index in range(10)])
    writer.write(scene)
    writer.finish({"train": [scene.id]})
    depth = FolderDataset(tmp_path / "out", "train")[0].depth
    assert ((depth == 0) == ((scene.depth == 0) | (scene.depth > 65535.5 / 5000))).all()


def begin(folder, **changes):
    scenes = SyntheticScenes("rooms", size=(24, 32), length=1)
    arguments = {"name": "scenes", "classes": scenes.classes, "palette": scenes.palette, **changes}
    return scenes[0], FolderWriter(folder, **arguments)


def test_an_id_may_name_a_folder(tmp_path):
    scene, writer = begin(tmp_path / "out")
    writer.write(replace(scene, id="room/1"))
    writer.finish({"train": ["room/1"]})
    assert torch.equal(FolderDataset(tmp_path / "out", "train")[0].label, scene.label)


def test_labels_of_no_class_are_refused(tmp_path):
    scene, writer = begin(tmp_path / "out")
    label = scene.label.clone()
    label[0, 0] = 256
    with pytest.raises(ValueError, match="x: labels must be 0 to 10 or 255, got 256"):
        writer.write(replace(scene, id="x", label=label))
    assert not writer.has("x")


@pytest.mark.parametrize(("changes", "message"), [
    ({"classes": ["wall"] * 10}, "'classes' must have different names, got 'wall' 10 times"),
    ({"palette": [(0, 0, 0)]}, "'palette' must have one colour for each of the 11"),
])  # fmt: skip
def test_what_could_not_be_read_is_not_begun(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        begin(tmp_path / "out", **changes)
    assert not list(tmp_path.iterdir())


def test_splits_name_only_what_was_written(tmp_path):
    scene, writer = begin(tmp_path / "out")
    writer.write(scene)
    with pytest.raises(ValueError, match="1 samples that were not written, for example 'other'"):
        writer.finish({"train": [scene.id], "val": ["other"]})
    assert not (tmp_path / "out").exists()


def test_folders_of_others_are_left_alone(tmp_path):
    mine = tmp_path / "out.partial" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ValueError, match="holds other files and is left as it is"):
        begin(tmp_path / "out")
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


def test_half_files_of_a_killed_process_do_not_stay(tmp_path):
    partial, ids = tmp_path / "out.partial", ["a.20240101.part", "b.20240101.part2"]
    begin(tmp_path / "out")
    (partial / f"dataset.{'0123abcd' * 4}.part.json").write_bytes(b"half")
    scene, writer = begin(tmp_path / "out")
    for id in ids:
        writer.write(replace(scene, id=id))
    (partial / f"images/c.{'0123abcd' * 4}.part.png").write_bytes(b"half")
    _, writer = begin(tmp_path / "out")
    writer.finish({"train": ids})
    for kind in ("images", "depth", "labels"):
        assert sorted(path.stem for path in (tmp_path / "out" / kind).iterdir()) == ids
    assert sorted(path.name for path in (tmp_path / "out").glob("*.json")) == ["dataset.json"]
