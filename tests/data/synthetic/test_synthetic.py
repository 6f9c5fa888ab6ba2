from __future__ import annotations

import errno
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from malleable.data import Sample, SyntheticScenes, open_dataset, splits_of

WORLDS = ("rooms", "streets")


def same(first: Sample, second: Sample) -> bool:
    equal = all(torch.equal(getattr(first, part), getattr(second, part)) for part in ("image", "depth", "label"))
    return equal and first.camera == second.camera and first.id == second.id


@pytest.mark.parametrize("world", WORLDS)
def test_a_sample_depends_on_seed_and_index_only(world):
    data = SyntheticScenes(world, seed=4)
    np.random.seed(1)
    later = data[7]
    for index in (7, 3):
        data[index]
    again = SyntheticScenes(world, seed=4, length=9)
    assert same(later, again[7])
    assert same(later, again[-2])
    assert not torch.equal(later.image, data[8].image)
    assert not torch.equal(later.image, SyntheticScenes(world, seed=5)[7].image)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("size", [(120, 160), (61, 47)])
def test_samples_are_what_every_data_set_gives(world, size):
    data = SyntheticScenes(world, size=size, length=3)
    sample = data[2]
    assert sample.image.shape == (3, *size)
    assert sample.image.dtype == torch.uint8
    assert sample.depth.dtype == torch.float32
    assert sample.camera.size == size
    assert sample.id == data.ids[2]
    assert 0 <= sample.label.min() <= sample.label.max() < len(data.classes) == len(data.palette)
    assert torch.isfinite(sample.depth).all()
    assert len(data) == 3
    with pytest.raises(IndexError):
        data[3]


def test_scenes_of_another_size_have_another_name():
    names = [open_dataset(source, "val").name for source in ("rooms", "rooms:120x160", "rooms:72x96")]
    assert names == ["synthetic-rooms", "synthetic-rooms", "synthetic-rooms-72x96"]


@pytest.mark.parametrize("world", WORLDS)
def test_every_class_occurs(world):
    data = SyntheticScenes(world, size=(60, 80))
    counts = sum(torch.bincount(data[i].label.flatten(), minlength=len(data.classes)) for i in range(60))
    assert (counts / counts.sum()).min() > 0.002


def test_range_and_holes():
    rooms = torch.stack([SyntheticScenes("rooms")[i].depth for i in range(10)])
    streets = torch.stack([SyntheticScenes("streets")[i].depth for i in range(10)])
    assert rooms[rooms > 0].min() >= 0.35
    assert rooms.max() < 10.5
    assert 0.005 < (rooms == 0).float().mean() < 0.1
    assert 100 < streets.max() < 300
    assert 0.1 < (streets == 0).float().mean() < 0.4


@pytest.mark.parametrize("seed", range(4))
def test_depth_and_camera_give_a_flat_floor(seed):
    """The floor, back-projected, is a plane: depth is along the axis and the focal length is the image's."""
    sample = SyntheticScenes("rooms", seed=seed)[0]
    floor = (sample.label == 1) & (sample.depth[0] > 0)
    points = sample.camera.back_project(sample.depth[0])[:, floor].double()
    centered = points - points.mean(dim=1, keepdim=True)
    normal = torch.linalg.svd(centered, full_matrices=False)[0][:, 2]
    assert (normal @ centered).std() < 0.03  # metres, noise included
    assert normal[1].abs() > 0.85  # upright but for the camera's pitch


def lookup_miou(train: list[tuple[np.ndarray, np.ndarray]], test: list[tuple[np.ndarray, np.ndarray]], n: int) -> float:
    """mIoU in percent of the best guess from one number per pixel, learnt by counting."""
    counts = np.zeros((1 + max(int(key.max()) for key, _ in train + test), n))
    for key, label in train:
        np.add.at(counts, (key, label), 1)
    prior = counts.sum(axis=0)
    guess = (counts / prior).argmax(axis=1)  # classes as if equally frequent, which favours mean IoU
    joint = np.zeros((n, n))
    for key, label in test:
        np.add.at(joint, (guess[key], label), 1)
    hit = joint.diagonal()
    return float(100 * (hit / (joint.sum(axis=0) + joint.sum(axis=1) - hit)).mean())


def test_colour_alone_does_not_give_the_class_and_place_in_space_says_more():
    data = SyntheticScenes("rooms", size=(60, 80))
    colours, places = [], []
    for i in range(120):
        sample = data[i]
        known = sample.depth[0] > 0
        label = sample.label[known].numpy()
        red, green, blue = (sample.image.long() // 32).numpy()
        points = sample.camera.back_project(sample.depth[0]).numpy()
        height = np.clip((points[1] + 2.5) * 4, 0, 20).astype(int)
        distance = np.clip(points[2] * 2, 0, 15).astype(int)
        colours.append(((red * 64 + green * 8 + blue)[known], label))
        places.append(((height * 16 + distance)[known], label))
    n = len(data.classes)
    colour, place = (lookup_miou(pairs[:80], pairs[80:], n) for pairs in (colours, places))
    assert colour < 15
    assert place > 1.5 * colour


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLEABLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("writable", [True, False])
def test_what_was_kept_is_what_was_rendered(cache, writable, monkeypatch):
    if not writable:
        cache.write_text("a file where the folder should be")
    plain, kept = (SyntheticScenes("rooms", size=(24, 32), length=2, keep=keep) for keep in (False, True))
    expected = plain[1]
    kept[1].image.zero_()  # what a caller does with a sample stays with the caller
    monkeypatch.setattr(SyntheticScenes, "_render", None)
    assert same(kept[-1], expected)


def test_what_one_process_rendered_another_reads(cache, monkeypatch):
    first = SyntheticScenes("streets", size=(24, 32), length=2, keep=True)
    expected = first[1]
    monkeypatch.setattr(SyntheticScenes, "_render", None)
    assert same(SyntheticScenes("streets", size=(24, 32), length=2, keep=True)[1], expected)
    assert same(pickle.loads(pickle.dumps(first))[1], expected)
    with pytest.raises(TypeError):  # nobody rendered this one
        first[0]


def test_a_damaged_record_is_rendered_again(cache):
    expected = SyntheticScenes("rooms", size=(24, 32), length=2, keep=True)[0]
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    assert same(SyntheticScenes("rooms", size=(24, 32), length=2, keep=True)[0], expected)


def test_files_of_another_renderer_are_replaced(cache):
    data = SyntheticScenes("rooms", size=(24, 32), length=2, keep=True)
    data[0]
    (file,) = cache.iterdir()
    old = file.with_name(file.name.replace(file.stem.rsplit("-")[-1], "0123456789ab"))
    old.write_bytes(b"old")
    other = SyntheticScenes("streets", size=(24, 32), length=2, keep=True)
    other[0]
    assert old.exists()
    SyntheticScenes("rooms", size=(24, 32), length=2, keep=True)[0]
    assert not old.exists()
    assert file.exists()


def test_what_is_kept_bears_the_version_that_rendered_it(cache):
    """An upgrade while a run goes on must not find scenes of the old code under the name of the new."""
    SyntheticScenes("rooms", size=(24, 32), length=2, keep=True)[0]
    (before,) = cache.iterdir()
    code = """
from pathlib import Path
from malleable.data import SyntheticScenes
Path.read_bytes = lambda _: b"new code"
SyntheticScenes("rooms", size=(24, 32), length=2, keep=True)[0]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert list(cache.iterdir()) == [before]


def test_what_was_kept_is_read_where_nothing_can_be_written(cache, monkeypatch):
    """As from the cache of another user, beside a file of an older version."""
    expected = [
        SyntheticScenes("rooms", size=(24, 32), length=3, keep=True)[0],
        SyntheticScenes("rooms", size=(24, 32), length=3)[1],
    ]
    (file,) = cache.iterdir()
    file.with_name(file.name.replace(file.stem.rsplit("-")[-1], "0123456789ab")).write_bytes(b"old")
    content = file.read_bytes()

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("malleable.data.synthetic.kept.open", refuse, raising=False)
    monkeypatch.setattr(Path, "unlink", refuse)
    data = SyntheticScenes("rooms", size=(24, 32), length=3, keep=True)
    assert same(data[1], expected[1])
    monkeypatch.setattr(SyntheticScenes, "_render", None)
    assert same(data[0], expected[0])
    assert same(data[1], expected[1])
    assert file.read_bytes() == content


def test_cameras_that_differ_little_are_kept_apart(cache):
    first, second = (
        SyntheticScenes("rooms", size=(24, 32), length=1, keep=True, zoom=zoom) for zoom in (1.0000001, 1.0000002)
    )
    assert first[0].camera != second[0].camera


@pytest.mark.parametrize("world", ["rooms", "streets"])
def test_sensors_see_the_same_scene(world):
    def seen(sensor):
        return SyntheticScenes(world, size=(60, 80), length=1, sensor=sensor)[0]

    perfect, own = seen("perfect"), seen(None)
    sky = perfect.label == 9 if world == "streets" else torch.zeros_like(perfect.label, dtype=torch.bool)
    assert torch.equal(perfect.depth[0] == 0, sky)
    assert same(own, seen("kinect" if world == "rooms" else "stereo"))
    for measured in (seen("kinect"), seen("stereo")):
        assert torch.equal(measured.label, perfect.label)
        assert measured.camera == perfect.camera
        known = (measured.depth > 0) & (perfect.depth > 0) & (perfect.depth < 10)
        error = (measured.depth / perfect.depth - 1)[known].abs()
        assert 0 < error.median() < 0.03


def test_zoom_is_a_longer_focal_length_in_the_same_place():
    near, far = (SyntheticScenes("rooms", size=(64, 96), length=1, zoom=zoom, sensor="perfect")[0] for zoom in (2, 1))
    assert near.camera.fx == 2 * far.camera.fx
    inner = far.depth[0, 16:48, 24:72]  # the middle half of the wide view is all of the narrow one
    outer = near.depth[0].unfold(0, 2, 2).unfold(1, 2, 2).mean((-1, -2))
    assert ((inner / outer - 1).abs() < 0.02).float().mean() > 0.9


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="rooms, streets"):
        SyntheticScenes("forests")
    with pytest.raises(ValueError, match="size"):
        SyntheticScenes(size=(4, 100))
    with pytest.raises(ValueError, match="seed"):
        SyntheticScenes(seed=-1)
    with pytest.raises(ValueError, match="kinect, stereo, perfect, or None, got 'lidar'"):
        SyntheticScenes(sensor="lidar")
    with pytest.raises(ValueError, match="zoom"):
        SyntheticScenes(zoom=0)


def test_worlds_open_by_name_with_disjoint_splits():
    assert splits_of("rooms") == ["train", "val", "test", "other-camera"]
    train, val = open_dataset("rooms", "train"), open_dataset("rooms", "val")
    assert not set(train.ids) & set(val.ids)
    with pytest.raises(ValueError, match="train, val, test, other-camera"):
        open_dataset("streets", "dev")
    other = open_dataset("rooms", "other-camera")
    assert (other.sensor, other.zoom, other.size, len(other)) == ("stereo", 0.75, (96, 128), 200)


def test_worlds_open_smaller():
    assert splits_of("streets:72x96") == splits_of("streets")
    assert open_dataset("rooms:72x96", "val").size == (72, 96)
    assert open_dataset("rooms:72x96", "other-camera").size == (57, 76)
    for wrong in ("rooms:72", "rooms:x96", "rooms:72x96x3", "halls:72x96"):
        with pytest.raises(FileNotFoundError, match="rooms:HEIGHTxWIDTH"):
            open_dataset(wrong, "val")
    with pytest.raises(ValueError, match="size must be"):
        open_dataset("rooms:4x96", "val")


def test_a_folder_opens_by_its_path(folder):
    assert open_dataset(folder(), "train").ids == ["a", "b"]


def test_a_folder_of_data_goes_before_a_world_of_its_name_and_no_other_folder_does(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rooms").mkdir()
    assert isinstance(open_dataset("rooms", "train"), SyntheticScenes)
    (tmp_path / "rooms").rmdir()
    folder().rename("rooms")
    assert open_dataset("rooms", "train").ids == ["a", "b"]


def test_a_full_disk_leaves_scenes_in_memory(cache, monkeypatch):
    expected = SyntheticScenes("rooms", size=(24, 32), length=2)[1]
    data = SyntheticScenes("rooms", size=(24, 32), length=2, keep=True)
    data[0]

    def no_space(path, mode):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("malleable.data.synthetic.kept.open", no_space, raising=False)
    assert same(data[1], expected)
    monkeypatch.setattr(SyntheticScenes, "_render", None)
    assert same(data[1], expected)


def test_scenes_of_any_size_are_kept(cache):
    expected = SyntheticScenes("rooms", size=(19, 25), length=1)[0]
    for _ in range(2):
        assert same(SyntheticScenes("rooms", size=(19, 25), length=1, keep=True)[0], expected)
