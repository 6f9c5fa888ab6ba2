from __future__ import annotations

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
    writer = FolderWriter(tmp_path / "out", "far", ["x"] * 10, [(0, 0, index) for index in range(10)])
    writer.write(scene)
    writer.finish({"train": [scene.id]})
    depth = FolderDataset(tmp_path / "out", "train")[0].depth
    assert ((depth == 0) == ((scene.depth == 0) | (scene.depth > 65535.5 / 5000))).all()
