"""Preparation of SUN RGB-D from a tree of its own layout, written here: four sensors, MATLAB files of both formats."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from malleable.cli import main
from malleable.data import FolderDataset
from malleable.data.sunrgbd import CLASSES, decode
from malleable.files import held

savemat = pytest.importorskip("scipy.io").savemat

THERE = "/n/fs/sun3d/data/SUNRGBD"  # where the set lay when its lists were written
FOLDERS = {  # of each image: height, width, in which split
    "kv1/NYUdata/NYU0001": (20, 28, "test"),
    "kv1/b3dodata/img_0063": (20, 28, "train"),
    "kv2/kinect2data/000002_2014-05-26_14-23-37_260595134347_rgbf000103-resize": (26, 36, "train"),
    "realsense/lg/2014_10_21-18_07_45-1311000053": (26, 34, "train"),
    "xtion/sun3ddata/hotel_sf/scan1/0002222-000074489847": (22, 30, "test"),
}
FOCAL = {folder: 30.0 + number for number, folder in enumerate(FOLDERS)}


def rotated(millimetres: Any) -> Any:
    """What the files hold: bits rotated to the left by three."""
    return ((millimetres << 3) | (millimetres >> 13)).astype(np.uint16)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    meta, labels = [], []
    random = np.random.default_rng(0)
    for folder, (height, width, _) in FOLDERS.items():
        here = root / "SUNRGBD" / folder
        for kind in ("image", "depth", "depth_bfx"):
            (here / kind).mkdir(parents=True)
        Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(here / "image/rgb.jpg")
        millimetres = random.integers(500, 7000, (height, width)).astype(np.uint32)
        Image.fromarray(rotated(millimetres)).save(here / "depth_bfx/z.png")
        millimetres[3, 4:9] = 0
        Image.fromarray(rotated(millimetres)).save(here / "depth/z.png")
        focal = FOCAL[folder]
        (here / "intrinsics.txt").write_text(f"{focal} 0 {width / 2}\n0 {focal} {height / 2}\n0 0 1\n")
        meta.append({"rgbpath": f"{THERE}/{folder}/image/rgb.jpg", "depthname": "z.png", "sensorType": "kv1"})
        labels.append(random.integers(0, 38, (height, width)).astype(np.uint16))
    toolbox = root / "SUNRGBDtoolbox"
    (toolbox / "Metadata").mkdir(parents=True)
    (toolbox / "traintestSUNRGBD").mkdir()
    names = list(meta[0])
    table = np.array([tuple(row[name] for name in names) for row in meta], dtype=[(name, object) for name in names])
    savemat(toolbox / "Metadata/SUNRGBDMeta.mat", {"SUNRGBDMeta": table})
    split = {
        f"all{split}": np.array([f"{THERE}/{folder}" for folder, about in FOLDERS.items() if about[2] == split], object)
        for split in ("train", "test")
    }
    savemat(toolbox / "traintestSUNRGBD/allsplit.mat", split)
    with h5py.File(toolbox / "Metadata/SUNRGBD2Dseg.mat", "w", userblock_size=512) as file:
        references = [file.create_dataset(f"#refs#/{i}", data=label.T).ref for i, label in enumerate(labels)]
        file.create_dataset("SUNRGBD2Dseg/seglabel", data=np.array(references, dtype=h5py.ref_dtype)[:, None])
    np.savez(root / "labels.npz", *labels)
    return root


def prepare(tree: Path, *options: str) -> int:
    return main(["prepare", "sunrgbd", str(tree), str(tree.parent / "out"), *options])


def test_every_image_has_its_pixels_depth_labels_and_camera(tree: Path) -> None:
    assert prepare(tree) == 0
    labels = np.load(tree / "labels.npz")
    number = list(FOLDERS)
    for split in ("train", "test"):
        data = FolderDataset(tree.parent / "out", split)
        assert data.classes == CLASSES
        assert data.ids == [folder for folder, about in FOLDERS.items() if about[2] == split]
        for sample in data:
            here, (height, width, _) = tree / "SUNRGBD" / sample.id, FOLDERS[sample.id]
            assert np.array_equal(sample.image.permute(1, 2, 0), Image.open(here / "image/rgb.jpg"))
            stored = np.array(Image.open(here / "depth_bfx/z.png")).astype(np.uint32)
            np.testing.assert_allclose(sample.depth[0], (stored >> 3) / 1000, atol=1e-6)  # below 8 m the rest is 0
            raw = labels[f"arr_{number.index(sample.id)}"].astype(np.int64)
            assert np.array_equal(sample.label, np.where(raw == 0, 255, raw - 1))
            camera = sample.camera
            assert (camera.fx, camera.fy, camera.size) == (FOCAL[sample.id], FOCAL[sample.id], (height, width))
            assert (camera.cx, camera.cy) == (width / 2 - 1, height / 2 - 1)  # MATLAB's first pixel is 1


def test_every_sensor_has_splits_of_its_own(tree: Path) -> None:
    prepare(tree)
    splits = {path.stem: path.read_text().split() for path in (tree.parent / "out/splits").iterdir()}
    expected = {"train", "test", "train-kv1", "test-kv1", "train-kv2", "train-realsense", "test-xtion"}
    assert splits.keys() == expected
    assert splits["train-kv1"] == ["kv1/b3dodata/img_0063"]
    assert sorted(id for name, ids in splits.items() if "-" in name for id in ids) == sorted(FOLDERS)


def test_raw_depth_keeps_its_holes_and_stands_in_where_there_is_no_other(tree: Path) -> None:
    (tree / "SUNRGBD/kv1/NYUdata/NYU0001/depth_bfx/z.png").unlink()
    prepare(tree)
    first, second = FolderDataset(tree.parent / "out", "test")
    assert (first.depth[0, 3, 4:9] == 0).all()
    assert (second.depth > 0).all()
    assert main(["prepare", "sunrgbd", str(tree), str(tree.parent / "raw"), "--depth", "raw"]) == 0
    for sample in FolderDataset(tree.parent / "raw", "train"):
        assert (sample.depth[0, 3, 4:9] == 0).all()


def test_a_size_takes_each_camera_along(tree: Path) -> None:
    assert prepare(tree, "--size", "10", "14") == 0
    sample = FolderDataset(tree.parent / "out", "test-xtion")[0]
    assert sample.image.shape == (3, 10, 14)
    focal = FOCAL[sample.id]
    assert (sample.camera.fx, sample.camera.fy) == pytest.approx((focal * 14 / 30, focal * 10 / 22))


def test_depth_is_decoded_as_the_toolbox_does() -> None:
    millimetres = np.array([0, 1, 999, 7999, 8191, 8192, 65535], np.uint32)
    counts = torch.from_numpy(rotated(millimetres).astype(np.int32))
    assert decode(counts).tolist() == pytest.approx([0, 0.001, 0.999, 7.999, 8, 8, 8])


def without_split(tree: Path) -> None:
    savemat(tree / "SUNRGBDtoolbox/traintestSUNRGBD/allsplit.mat", {"alltrain": [f"{THERE}/kv1"], "alltest": [THERE]})


def without_table(tree: Path) -> None:
    savemat(tree / "SUNRGBDtoolbox/Metadata/SUNRGBDMeta.mat", {"other": 1})


def damaged(tree: Path) -> None:
    (tree / "SUNRGBDtoolbox/Metadata/SUNRGBDMeta.mat").write_bytes(b"no MATLAB file" * 20)


def outside(tree: Path) -> None:
    path = f"{THERE}/kv1/../../secret/image/rgb.jpg"
    savemat(tree / "SUNRGBDtoolbox/Metadata/SUNRGBDMeta.mat", {"SUNRGBDMeta": {"rgbpath": path, "depthname": "z.png"}})


def elsewhere(tree: Path) -> None:
    path = "kv1/NYUdata/NYU0001/image/rgb.jpg"
    savemat(tree / "SUNRGBDtoolbox/Metadata/SUNRGBDMeta.mat", {"SUNRGBDMeta": {"rgbpath": path, "depthname": "z.png"}})


def fewer_labels(tree: Path) -> None:
    with h5py.File(tree / "SUNRGBDtoolbox/Metadata/SUNRGBD2Dseg.mat", "r+") as file:
        kept = file["SUNRGBD2Dseg/seglabel"][:3]
        del file["SUNRGBD2Dseg/seglabel"]
        file.create_dataset("SUNRGBD2Dseg/seglabel", data=kept)


def strange_labels(tree: Path) -> None:
    with h5py.File(tree / "SUNRGBDtoolbox/Metadata/SUNRGBD2Dseg.mat", "r+") as file:
        file["#refs#/0"][0, 0] = 38


def other_size(tree: Path) -> None:
    Image.new("RGB", (8, 8)).save(tree / "SUNRGBD/kv1/NYUdata/NYU0001/image/rgb.jpg")


def no_camera(tree: Path) -> None:
    (tree / "SUNRGBD/kv1/NYUdata/NYU0001/intrinsics.txt").write_text("518 0 3")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_split, "allsplit.mat names kv1/NYUdata/NYU0001 neither to train nor to test"),
        (without_table, "has no 'SUNRGBDMeta'"),
        (damaged, "cannot be read as a MATLAB file"),
        (elsewhere, "image 1 has the path 'kv1/NYUdata/NYU0001/image/rgb.jpg', not .../SUNRGBD/"),
        (outside, "points outside of the data set"),
        (fewer_labels, "SUNRGBD2Dseg.mat: it has labels of 3 images, but SUNRGBDMeta.mat lists 5"),
        (strange_labels, "NYU0001: labels must be 0 to 37, got 0 to 38"),
        (other_size, "NYU0001: depth is (20, 28) but the image (8, 8)"),
        (no_camera, "intrinsics.txt must hold the nine numbers of an intrinsic matrix, got 3"),
    ],
)
def test_what_is_wrong_is_named(tree: Path, capsys: pytest.CaptureFixture[str], spoil: Any, message: str) -> None:
    spoil(tree)
    assert prepare(tree, "--workers", "1") == 1
    assert message in capsys.readouterr().err
    assert not (tree.parent / "out").exists()


def test_a_wrong_size_leaves_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(tree, "--size", "0", "320") == 1
    assert "size must be (height, width), both at least 1, got (0, 320)" in capsys.readouterr().err
    assert not list(tree.parent.glob("out*"))


def test_a_second_one_at_a_time_is_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tree.parent / "out.lock"):
        assert prepare(tree) == 1
    assert "out.lock is in use by" in capsys.readouterr().err
    assert prepare(tree) == 0
    assert sorted(path.name for path in tree.parent.glob("out*")) == ["out"]


def test_a_missing_part_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(tmp_path) == 1
    assert "SUNRGBD.zip and SUNRGBDtoolbox.zip" in capsys.readouterr().err


def test_without_scipy_it_says_what_to_install(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert prepare(tree) == 1
    assert "pip install scipy" in capsys.readouterr().err
