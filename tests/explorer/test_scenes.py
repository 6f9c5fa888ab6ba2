"""Scenes of the explorer: what is handed in, what is wrong with depth, and what is sent to the page."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers.files import save
from helpers.toys import scenes
from malleable.explorer.scenes import Fault, depth_of, handed_in, picture_of, with_focal

SAMPLE = scenes()[1]
DEPTH = SAMPLE.depth.as_subclass(Tensor)
KNOWN = DEPTH > 0


@pytest.fixture
def image(tmp_path: Path) -> str:
    save(np.full((12, 16, 3), 99, np.uint8), tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


def test_an_image_with_depth_becomes_a_sample(image: str, tmp_path: Path) -> None:
    save(np.full((12, 16), 1500, np.uint16), tmp_path / "far.png")
    sample = handed_in(image, str(tmp_path / "far.png"), "mm", 20.0)
    torch.testing.assert_close(sample.depth.as_subclass(Tensor), torch.full((1, 12, 16), 1.5))
    assert sample.camera.focal == 20.0
    assert int(sample.image[0, 0, 0]) == 99


def test_an_image_alone_has_no_depth(image: str) -> None:
    assert not handed_in(image, None, "mm", None).depth.any()


def test_npy_is_in_metres_whatever_unit_counts_have(image: str, tmp_path: Path) -> None:
    np.save(tmp_path / "far.npy", np.full((12, 16), 2.5, np.float32))
    assert handed_in(image, str(tmp_path / "far.npy"), "mm", 20.0).depth.unique().item() == 2.5


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_what_is_wrong_is_said_in_a_sentence_without_folders(image: str, tmp_path: Path) -> None:
    grey, deep = tmp_path / "grey.png", tmp_path / "deep.png"
    save(np.zeros((12, 16), np.uint8), grey)
    save(np.full((6, 8), 1500, np.uint16), deep)
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    vast = io.BytesIO()
    np.lib.format.write_array_header_1_0(vast, {"descr": "<f4", "fortran_order": False, "shape": (1 << 22, 1 << 22)})
    huge = Image.new("1", (5000, 4000))
    huge.save(tmp_path / "huge.png")
    cases = [
        (None, None, 20.0, "hand in an image first"),
        (write(tmp_path / "broken.png", b"\x89PNG\r\n\x1a\nno"), None, 20.0, "broken.png cannot be read as an image"),
        (write(tmp_path / "run.py", b"1"), None, 20.0, "run.py is no file for an image"),
        (tmp_path / "huge.png", None, 20.0, "huge.png has 20,000,000 pixels"),
        (image, grey, 20.0, "grey.png is a 8-bit image, too coarse"),
        (image, deep, 20.0, "deep.png is 6×8"),
        (image, tmp_path / "objects.npy", 20.0, "objects.npy cannot be read as an array of numbers"),
        (image, tmp_path / "photo.jpg", 20.0, "photo.jpg is no file for depth"),
        (image, write(tmp_path / "vast.npy", vast.getvalue()), 20.0, "vast.npy cannot be read as an array"),
        (image, write(tmp_path / "cut.npy", b"\x93NUMPY"), 20.0, "cut.npy cannot be read"),
        (image, tmp_path / "fine.png", None, "give its focal length"),
        (image, tmp_path / "fine.png", -3.0, "focal length"),
    ]
    save(np.full((12, 16), 1500, np.uint16), tmp_path / "fine.png")
    for picture, depth, focal, words in cases:
        with pytest.raises(ValueError, match=words) as caught:
            handed_in(None if picture is None else str(picture), None if depth is None else str(depth), "mm", focal)
        assert str(tmp_path) not in str(caught.value)


def test_nothing_wrong_changes_nothing() -> None:
    assert torch.equal(Fault()(SAMPLE).depth, SAMPLE.depth)


def test_depth_is_scaled_shifted_moved_and_gone() -> None:
    depth = {name: Fault(**{name: value})(SAMPLE).depth.as_subclass(Tensor) for name, value in
             {"times": 3.0, "plus": 0.5, "pixels": 4, "unknown": 1.0}.items()}  # fmt: skip
    torch.testing.assert_close(depth["times"], 3 * DEPTH)
    torch.testing.assert_close(depth["plus"], torch.where(KNOWN, DEPTH + 0.5, 0.0))
    torch.testing.assert_close(depth["pixels"][..., 4:], DEPTH[..., :-4])
    assert not depth["unknown"].any()


def test_unknown_depth_stays_unknown_and_none_is_negative() -> None:
    depth = Fault(plus=-2.0, noise=0.1)(SAMPLE).depth
    assert not depth[~KNOWN].any()
    assert (depth >= 0).all()


def test_noise_and_holes_are_the_same_each_time_and_as_much_as_said() -> None:
    fault = Fault(noise=0.05, unknown=0.5)
    once, again = (fault(SAMPLE).depth.as_subclass(Tensor) for _ in range(2))
    assert torch.equal(once, again)
    noisy = Fault(noise=0.05)(SAMPLE).depth.as_subclass(Tensor)
    assert (noisy[KNOWN] / DEPTH[KNOWN]).std().item() == pytest.approx(0.05, rel=0.2)
    lost = (once == 0) & KNOWN
    assert lost.sum() / KNOWN.sum() == pytest.approx(0.5, abs=0.15)


def test_another_focal_length_keeps_the_ratio() -> None:
    sample = replace(SAMPLE, camera=replace(SAMPLE.camera, fx=20.0, fy=30.0))
    camera = with_focal(sample, 50.0).camera
    assert (camera.fx, camera.fy, camera.focal) == (40.0, 60.0, 50.0)


@pytest.mark.parametrize("factor", [1, 20])
def test_the_pages_depth_is_that_of_every_so_many_pixels(factor: int) -> None:
    depth = DEPTH.repeat(1, factor, factor)
    height, width = depth.shape[-2:]
    camera = replace(SAMPLE.camera, size=(height, width))
    big = replace(SAMPLE, image=SAMPLE.image.repeat(1, factor, factor), depth=depth, camera=camera,
                  label=torch.zeros(height, width, dtype=torch.int64))  # fmt: skip
    sent = depth_of(big)
    counts = np.frombuffer(base64.b64decode(sent["counts"]), "<u2").reshape(sent["rows"], sent["columns"])
    expected = depth[0, :: sent["step"], :: sent["step"]].numpy()
    np.testing.assert_allclose(counts * sent["metres"], expected, atol=sent["metres"])
    np.testing.assert_array_equal(counts == 0, expected == 0)
    assert counts.size <= 24_000


def test_the_pages_picture_is_the_image() -> None:
    sent = picture_of(SAMPLE)
    kind, _, content = sent["image"].partition(";base64,")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))).convert("RGB")).astype(int)
    assert kind == "data:image/jpeg"
    assert (sent["width"], sent["height"]) == (32, 24)
    assert np.abs(pixels - SAMPLE.image.permute(1, 2, 0).numpy()).mean() < 12
