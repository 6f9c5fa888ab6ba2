from __future__ import annotations

import json
import math
import os
import signal
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.files import CAMERA, SIZE, save
from malleable import Camera
from malleable.data import FolderDataset
from malleable.data.image_files import read_rgb


def test_a_sample_is_what_the_files_say(folder):
    root = folder()
    data = FolderDataset(root, "train")
    sample = data[1]
    assert len(data) == 2
    assert sample.id == "b"
    assert torch.equal(sample.image, torch.from_numpy(np.array(Image.open(root / "images/b.png"))).permute(2, 0, 1))
    assert torch.equal(sample.label, torch.from_numpy(np.array(Image.open(root / "labels/b.png"))).long())
    counts = np.asarray(Image.open(root / "depth/b.png")).astype(np.float32)
    np.testing.assert_allclose(sample.depth[0].numpy(), counts / 1000, rtol=1e-6)
    assert sample.camera == Camera.from_dict(CAMERA)
    assert (sample.image.dtype, sample.depth.dtype, sample.label.dtype) == (torch.uint8, torch.float32, torch.int64)


def test_classes_and_palette(folder):
    palette = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    data = FolderDataset(folder(palette=palette), "test")
    assert data.classes == ("wall", "floor", "thing")
    assert [list(colour) for colour in data.palette] == palette


def test_without_a_palette_every_class_gets_its_own_colour(folder):
    assert len(set(FolderDataset(folder(), "test").palette)) == 3


def test_invalid_depth_and_ignore_are_mapped(folder):
    root = folder(invalid_depth=65535, ignore=9)
    depth, label = np.full(SIZE, 1000, np.uint16), np.zeros(SIZE, np.uint8)
    depth[0, :3], label[2, :4] = (65535, 0, 2000), 9
    save(depth, root / "depth/a.png")
    save(label, root / "labels/a.png")
    sample = FolderDataset(root, "train")[0]
    assert sample.depth[0, 0, :4].tolist() == [0.0, 0.0, 2.0, 1.0]
    assert (sample.label == 255).sum() == 4


def test_depth_in_metres_may_be_an_array(folder):
    root = folder(invalid_depth=2)
    depth = np.full(SIZE, 2, np.float64)
    depth[0, :3] = (np.nan, -1, 0.75)
    (root / "depth/a.png").unlink()
    np.save(root / "depth/a.npy", depth)
    sample = FolderDataset(root, "train")[0]
    assert sample.depth[0, 0, :4].tolist() == [0.0, 0.0, 0.75, 2.0]


@pytest.mark.parametrize("content", ["archive", "PK\x03\x04 damaged", "a head of }"])
def test_depth_that_is_an_archive_or_damaged_is_named(content, folder):
    path = folder() / "depth/a.npy"
    (path.parent / "a.png").unlink()
    if content == "archive":
        with path.open("wb") as file:
            np.savez(file, depth=np.ones(SIZE))
    elif content == "a head of }":
        np.save(path, np.ones(SIZE))
        path.write_bytes(path.read_bytes().replace(b"}", b"x", 1))
    else:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"a\.npy (is an archive of arrays|cannot be read as an array)"):
        FolderDataset(path.parents[1], "train")[0]


def test_a_camera_file_goes_before_the_common_camera(folder):
    root = folder()
    (root / "cameras").mkdir()
    (root / "cameras/b.json").write_text(json.dumps({**CAMERA, "fx": 99.0}))
    data = FolderDataset(root, "train")
    assert [data[0].camera.fx, data[1].camera.fx] == [20.0, 99.0]


def test_grey_palette_and_jpeg_images_are_read_as_colour(folder):
    root = folder()
    (root / "images/a.png").unlink()
    Image.new("L", SIZE[::-1], 77).save(root / "images/a.jpg")
    Image.new("P", SIZE[::-1], 0).save(root / "images/b.png")
    data = FolderDataset(root, "train")
    assert (data[0].image == 77).all()
    assert data[1].image.shape == (3, *SIZE)


def test_without_labels_everything_is_ignored(folder):
    root = folder()
    for path in (root / "labels").iterdir():
        path.unlink()
    (root / "labels").rmdir()
    assert (FolderDataset(root, "train")[0].label == 255).all()


def breaks(root: Path, message: str, split: str = "train") -> None:
    with pytest.raises((ValueError, OSError), match=message):
        FolderDataset(root, split)[0]


def test_missing_depth_is_named_at_once(folder):
    root = folder()
    (root / "depth/b.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 files of split 'train' are missing: .*depth/b\.png.*train\.txt"):
        FolderDataset(root, "train")
    assert FolderDataset(root, "train", strict=False)[0].id == "a"
    with pytest.raises(FileNotFoundError, match=r"depth/b\.png is missing"):
        FolderDataset(root, "train", strict=False)[1]


@pytest.mark.parametrize("kind", ["depth", "labels"])
def test_sizes_that_differ(folder, kind):
    root = folder()
    pixels = np.full((6, 8), 1000, np.uint16) if kind == "depth" else np.zeros((6, 8), np.uint8)
    save(pixels, root / kind / "a.png")
    breaks(root, rf"{kind}/a\.png is 6×8 .* but its image is 12×16")


def test_camera_of_another_size(folder):
    breaks(folder(camera={**CAMERA, "width": 32}), r"images/a\.png is 12×16 .* camera is for 12×32 .*cameras/a\.json")


def test_labels_outside_the_class_list(folder):
    root = folder()
    save(np.full(SIZE, 3, np.uint8), root / "labels/a.png")
    breaks(root, r"labels/a\.png holds labels \[3\], outside the 3 classes")


def test_eight_bit_depth(folder):
    root = folder()
    save(np.full(SIZE, 200, np.uint8), root / "depth/a.png")
    breaks(root, r"depth/a\.png is a 8-bit image.*16-bit")


@pytest.mark.parametrize("unit", [1e-6, 1.0])
def test_a_unit_that_cannot_be(folder, unit):
    breaks(folder(metres_per_count=unit), r"depth/a\.png: .*wrong unit.*metres_per_count")


@pytest.mark.parametrize(("unit", "median"), [(1e-6, "0.003 m"), (1.0, "3000 m")])
def test_a_median_of_3_mm_or_3_km_is_refused(folder, unit, median):
    root = folder(metres_per_count=unit)
    save(np.full(SIZE, 3000, np.uint16), root / "depth/a.png")
    breaks(root, median)


def test_depth_that_is_wholly_unknown_is_allowed(folder):
    root = folder()
    save(np.zeros(SIZE, np.uint16), root / "depth/a.png")
    assert (FolderDataset(root, "train")[0].depth == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": None}, "'classes' must be a list"),
        ({"classes": ["wall", "floor", "wall"]}, "'classes' must have different names, got 'wall' 2 times"),
        ({"metres_per_count": None}, "'metres_per_count' must be a positive number"),
        ({"metres_per_count": "mm"}, "'metres_per_count'.*'mm'"),
        ({"ignore": 1}, "'ignore' must not be the index of a class, got 1 .'floor'"),
        ({"palette": [[0, 0, 0]]}, "'palette' must have one colour for each of the 3"),
        ({"palette": [[0, 0, 0], [0, 0, 300], [0, 0, 1]]}, "300"),
        ({"camera": {**CAMERA, "fx": None}}, "'fx'"),
        ({"camera": None}, r"a has no camera"),
        ({"camera": [640, 480]}, "'camera' must hold width"),
        *(({"metres_per_count": m}, "'metres_per_count'") for m in (-1, 0, math.nan, 1e300, 10**400, 1e-300, True)),
        *(({"ignore": value}, "'ignore'") for value in (-1, 256, 10**9, 255.0, "255", True)),
        *(({"invalid_depth": value}, "'invalid_depth'") for value in (-1, 65536, 0.5, "0", False)),
        *(({"camera": {**CAMERA, "fx": f}}, "'fx'") for f in (-20, 0, math.nan, 1e300, 10**400, 1e-300, "20", True)),
        *(({"camera": {**CAMERA, "cy": value}}, "'cy'") for value in (math.inf, -1e300, "6", True)),
        *(({"camera": {**CAMERA, "width": value}}, "'width'") for value in (-16, 0, 16.5, math.nan, 1e300, "16", True)),
        ({"palette": [[True, 0, 0], [0, 0, 1], [0, 0, 2]]}, "'palette'"),
    ],
)
def test_a_wrong_description_names_its_file(folder, changes, message):
    breaks(folder(**changes), rf"dataset\.json.*{message}|{message}.*dataset\.json")


@pytest.mark.parametrize("value", [-20, math.nan, 1e300, "20"])
def test_a_wrong_camera_file_is_named(folder, value):
    root = folder()
    (root / "cameras").mkdir()
    (root / "cameras/a.json").write_text(json.dumps({**CAMERA, "fx": value}))
    breaks(root, r"cameras/a\.json: .*'fx'")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
@pytest.mark.parametrize(
    "name", ["dataset.json", "splits/train.txt", "images/a.png", "depth/a.png", "labels/a.png", "cameras/a.json"]
)
def test_a_pipe_is_refused_and_not_waited_for(folder, name):
    path = folder() / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the pipe was waited for"))
    signal.setitimer(signal.ITIMER_REAL, 5)
    try:
        breaks(path.parents[name.count("/")], f"{name} is not a regular file")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_the_longest_ids_are_read(folder):
    root, id = folder(), "a" * 251  # with .png as long as a name can be, with .jpeg or .json longer
    for kind in ("images", "depth", "labels"):
        (root / kind / "a.png").rename(root / kind / f"{id}.png")
    (root / "cameras").mkdir()
    (root / "splits/train.txt").write_text(id)
    assert FolderDataset(root, "train")[0].id == id


def test_a_split_lies_in_the_folder(folder):
    root = folder()
    (root / "secret.txt").write_text("a\n")
    breaks(root, r"split '\.\./secret' points outside", split="../secret")


def test_broken_json(folder):
    root = folder()
    (root / "dataset.json").write_text("{")
    breaks(root, r"dataset\.json is not valid JSON")


def test_a_missing_split_lists_those_there_are(folder):
    breaks(folder(), r"val\.txt is missing; .*'test', 'train'", split="val")


@pytest.mark.parametrize("id", ["../secret", "/etc/passwd", "x/../../y", "..\\\\y", "C:y"])
def test_ids_stay_inside_the_folder(folder, id):
    root = folder()
    (root / "splits/train.txt").write_text(f"{id}\n")
    breaks(root, "points outside")


@pytest.mark.parametrize("id", ["./a", "sub//a", "a/", "a\0", "a\x1b[2J"])
def test_ids_are_plain(folder, id):
    root = folder()
    (root / "splits/train.txt").write_text(f"{id}\n")
    breaks(root, r"train\.txt: id .* cannot name a file")


def test_a_split_may_begin_with_a_byte_order_mark(folder):
    root = folder()
    (root / "splits/train.txt").write_text("a\nb\n", encoding="utf-8-sig")
    assert FolderDataset(root, "train").ids == ["a", "b"]


def test_a_split_that_is_no_text_is_named(folder):
    root = folder()
    (root / "splits/train.txt").write_bytes("é".encode("latin-1"))
    breaks(root, r"train\.txt is not text in UTF-8")


def test_grey_labels_of_four_bits_are_refused(folder):
    """Pillow would multiply them by 17."""
    root = folder()
    rows = b"".join(b"\0" + bytes([0x11] * (SIZE[1] // 2)) for _ in range(SIZE[0]))
    header = struct.pack(">IIBBBBB", SIZE[1], SIZE[0], 4, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    png = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    (root / "labels/a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + png)
    assert (read_rgb(root / "labels/a.png") == 17).all()  # right for a picture
    breaks(root, r"labels/a\.png is a L;4 image; labels must be 8-bit grey")


def test_an_id_twice(folder):
    root = folder()
    (root / "splits/train.txt").write_text("a\nb\na\n")
    breaks(root, "lists 'a' twice")


@pytest.mark.parametrize("kind", ["images", "depth", "labels"])
@pytest.mark.parametrize("keep", [0, 20, 0.7])
def test_corrupt_files_are_named(folder, kind, keep):
    root = folder()
    path = root / kind / "a.png"
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    breaks(root, rf"{kind}/a\.png cannot be read as an image")


def test_only_png_and_jpeg_are_opened_whatever_the_name(folder):
    root = folder()
    Image.new("RGB", SIZE[::-1]).save(root / "images/a.png", format="EPS")  # Pillow would start Ghostscript for it
    breaks(root, r"images/a\.png cannot be read as an image")


def test_deep_colour_images_are_refused(folder):
    root = folder()
    save(np.zeros(SIZE, np.uint16), root / "images/a.png")
    breaks(root, r"images/a\.png is a I;16 image; colour images must have 8 bits")


@pytest.mark.parametrize("limit", [SIZE[0] * SIZE[1] - 1, 10])  # Pillow alone would only warn about the first
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_image_bombs_are_refused(folder, monkeypatch, limit):
    root = folder()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    breaks(root, r"images/a\.png is too large to be read safely")
