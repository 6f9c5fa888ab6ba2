from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from malleable.data import FolderDataset, FolderWriter, Sample, SyntheticScenes


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


def begin(folder, **changes):
    scenes = SyntheticScenes("rooms", size=(24, 32), length=1)
    arguments = {"name": "scenes", "classes": scenes.classes, "palette": scenes.palette, **changes}
    return scenes[0], FolderWriter(folder, **arguments)


def test_an_id_may_name_a_folder(tmp_path):
    scene, writer = begin(tmp_path / "out")
    writer.write(replace(scene, id="room/1"))
    writer.finish({"train": ["room/1"]})
    assert torch.equal(FolderDataset(tmp_path / "out", "train")[0].label, scene.label)


UNSAFE_IDS = [
    "", "../../escaped", "/escaped", "a/../../escaped", "..", "..\\escaped", "C:escaped", "C:/escaped", "a/./b", "a//b",
    "a/", "a\0b", "a\nb", "a\rb", "a\u2028b", " a", "a ", "\ufeffa",
]  # fmt: skip


@pytest.mark.parametrize("id", UNSAFE_IDS)
def test_an_id_that_names_no_file_of_the_set_is_refused(tmp_path, id):
    scene, writer = begin(tmp_path / "sets" / "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="id"):
        writer.write(replace(scene, id=id))
    assert sorted(tmp_path.rglob("*")) == before


def test_splits_spell_ids_as_samples_do(tmp_path):
    scene, writer = begin(tmp_path / "out")
    writer.write(replace(scene, id="a/b"))
    with pytest.raises(ValueError, match=r"id 'a/\./b'"):
        writer.finish({"train": ["a/./b"]})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split", ["", "../train", "a\nb"])
def test_a_split_is_a_file_of_the_set(tmp_path, split):
    scene, writer = begin(tmp_path / "out")
    writer.write(scene)
    with pytest.raises(ValueError, match="split"):
        writer.finish({split: [scene.id]})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("splits", [{}, {"train": [], "val": ["x"]}, {"train": ["x", "x"]}])
def test_splits_that_could_not_be_read_are_refused(tmp_path, splits):
    scene, writer = begin(tmp_path / "out")
    writer.write(replace(scene, id="x"))
    with pytest.raises(ValueError, match="split"):
        writer.finish(splits)
    assert not (tmp_path / "out").exists()


def test_a_sample_in_no_split_is_named(tmp_path):
    scene, writer = begin(tmp_path / "out")
    for id in ("a", "room/b"):
        writer.write(replace(scene, id=id))
    with pytest.raises(ValueError, match=r"1 samples are in no split, for example 'room/b'"):
        writer.finish({"train": ["a"]})
    writer.finish({"train": ["a"], "val": ["room/b"]})
    assert (tmp_path / "out").is_dir()


def test_two_samples_of_one_id_are_refused(tmp_path):
    scene, writer = begin(tmp_path / "out")
    writer.write(scene)
    with pytest.raises(ValueError, match=f"id '{scene.id}' was written before"):
        writer.write(scene)


def test_ids_that_differ_in_case_share_no_file_where_case_does_not_count(tmp_path):
    _, writer = begin(tmp_path / "out")
    (writer.partial / "DATASET.JSON").write_bytes((writer.partial / "dataset.json").read_bytes())
    scene, writer = begin(tmp_path / "out")  # to which both names seem to be one file
    writer.write(replace(scene, id="IMG_1"))
    with pytest.raises(ValueError, match="'img_1' was written before as 'IMG_1', which is the same file here"):
        writer.write(replace(scene, id="img_1"))


def test_a_folder_begun_otherwise_says_what_differs(tmp_path):
    begin(tmp_path / "out", classes=("a", "b"), palette=None)
    with pytest.raises(ValueError, match=r"begun with other settings, classes \['a', 'b'\] and not \['a', 'c'\]"):
        begin(tmp_path / "out", classes=("a", "c"), palette=None)


def test_a_sample_whose_writing_failed_can_be_written_again(tmp_path):
    scene, writer = begin(tmp_path / "out")
    in_the_way = writer.partial / "depth" / f"{scene.id}.png"
    in_the_way.mkdir()
    with pytest.raises(OSError, match=scene.id):
        writer.write(scene)
    assert not writer.has(scene.id)
    in_the_way.rmdir()
    writer.write(scene)
    writer.finish({"train": [scene.id]})
    assert torch.equal(FolderDataset(tmp_path / "out", "train")[0].label, scene.label)


def far(scene, metres):
    depth = scene.depth.clone()
    depth[0, 3, 4] = metres
    return replace(scene, id="x", depth=depth)


@pytest.mark.parametrize(("metres", "unit"), [(60.0, "0.00092"), (4000.0, "0.062")])
def test_depth_that_does_not_fit_is_named_with_the_unit_that_holds_it(tmp_path, metres, unit):
    scene, writer = begin(tmp_path / "out")
    with pytest.raises(ValueError, match=rf"x: .* {metres:g} m, .*13\.107 m.*metres_per_count={unit}"):
        writer.write(far(scene, metres))
    assert not list((tmp_path / "out.partial/images").iterdir())
    scene, writer = begin(tmp_path / "other", metres_per_count=float(unit))
    writer.write(far(scene, metres))


@pytest.mark.parametrize("metres", [0.0, -1.0, float("nan"), float("inf")])
def test_depth_that_no_sensor_measured_is_unknown(tmp_path, metres):
    scene, writer = begin(tmp_path / "out")
    writer.write(far(scene, metres))
    writer.finish({"train": ["x"]})
    assert FolderDataset(tmp_path / "out", "train")[0].depth[0, 3, 4] == 0


def test_the_farthest_depth_that_fits_is_kept(tmp_path):
    scene, writer = begin(tmp_path / "out")
    writer.write(far(scene, 13.107))
    writer.finish({"train": ["x"]})
    assert FolderDataset(tmp_path / "out", "train")[0].depth[0, 3, 4] == pytest.approx(13.107)


def test_without_a_palette_classes_get_the_default_colours(tmp_path):
    scene, writer = begin(tmp_path / "out", palette=None)
    writer.write(scene)
    writer.finish({"train": [scene.id]})
    assert len(set(FolderDataset(tmp_path / "out", "train").palette)) == 11


def test_a_palette_may_be_an_array(tmp_path):
    colours = np.arange(33, dtype=np.uint8).reshape(11, 3)
    scene, writer = begin(tmp_path / "out", palette=colours)
    writer.write(scene)
    writer.finish({"train": [scene.id]})
    np.testing.assert_array_equal(FolderDataset(tmp_path / "out", "train").palette, colours)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, ">u2", np.int32])
def test_arrays_are_written_as_tensors_are(tmp_path, kind):
    scene, writer = begin(tmp_path / "out")
    parts = scene.image.numpy()[:, ::-1], scene.depth.numpy().astype(np.float64), scene.label.numpy().astype(kind)
    sample = Sample(*parts, scene.camera, "x")
    assert (sample.image.dtype, sample.depth.dtype, sample.label.dtype) == (torch.uint8, torch.float32, torch.int64)
    writer.write(sample)
    writer.finish({"train": ["x"]})
    read = FolderDataset(tmp_path / "out", "train")[0]
    assert torch.equal(read.image, scene.image.flip(1))
    assert torch.equal(read.label, scene.label)


def test_what_an_array_masks_is_unknown():
    scene = SyntheticScenes("rooms", size=(24, 32), length=1)[0]
    left = np.zeros((24, 32), bool)
    left[:, 0] = True
    depth = np.ma.array(np.full((1, 24, 32), 65.535, np.float32), mask=left[None])
    label = np.ma.array(np.full((24, 32), 3, np.int8), mask=left)
    sample = replace(scene, depth=depth, label=label)
    assert (sample.depth[0, :, 0] == 0).all()
    assert (sample.depth[0, :, 1:] == depth.data[0, 0, 0]).all()
    assert (sample.label[:, 0] == 255).all()
    assert (sample.label[:, 1:] == 3).all()


@pytest.mark.parametrize(("change", "message"), [
    ({"image": [[1]]}, "image must be a tensor or an array, got list"),
    ({"image": np.zeros((3, 24, 32), np.int64)}, "image must be uint8 or floating-point, got torch.int64"),
    ({"depth": np.zeros((1, 24, 32), np.uint16)}, "malleable.to_metres converts counts"),
    ({"label": np.zeros((24, 32))}, "label whole numbers"),
])  # fmt: skip
def test_arrays_of_a_wrong_kind_are_named(change, message):
    scene = SyntheticScenes("rooms", size=(24, 32), length=1)[0]
    with pytest.raises(TypeError, match=message):
        replace(scene, **change)


def test_only_images_that_are_not_normalised_are_written(tmp_path):
    scene, writer = begin(tmp_path / "out")
    with pytest.raises(TypeError, match=r"image must be uint8, got torch\.float32"):
        writer.write(replace(scene, image=scene.image / 255))
    assert not list((tmp_path / "out.partial/images").iterdir())


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


def test_a_folder_that_cannot_be_replaced_is_refused_before_the_work(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"link is a link or a mount point.*name one inside it"):
        begin(tmp_path / "link")


def test_an_empty_folder_is_filled(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    scene, writer = begin(".")
    writer.write(scene)
    writer.finish({"train": [scene.id]})
    assert len(FolderDataset(tmp_path / "out", "train")) == 1


@pytest.mark.parametrize("file", ["depth/{}.png", "cameras/{}.json"])
def test_what_a_power_cut_left_empty_is_written_again(tmp_path, file):
    scene, writer = begin(tmp_path / "out")
    writer.write(scene)
    (writer.partial / file.format(scene.id)).write_bytes(b"")
    _, again = begin(tmp_path / "out")
    assert not again.has(scene.id)
    again.write(scene)
    assert again.has(scene.id)
