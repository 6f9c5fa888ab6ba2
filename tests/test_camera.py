from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from malleable import Camera, to_metres

CAMERA = Camera(fx=518.9, fy=519.5, cx=325.6, cy=253.7, size=(480, 640))


def ray(camera: Camera, row: float, column: float) -> tuple[float, float]:
    """Direction of a pixel as (x / z, y / z), all that a change of the image must leave alone."""
    return (column - camera.cx) / camera.fx, (row - camera.cy) / camera.fy


pixels = st.tuples(st.floats(0, 479), st.floats(0, 639))


@given(pixels, st.tuples(st.integers(1, 2000), st.integers(1, 2000)))
def test_resize_keeps_rays(pixel: tuple[float, float], size: tuple[int, int]) -> None:
    row, column = ((p + 0.5) * new / old - 0.5 for p, new, old in zip(pixel, size, CAMERA.size, strict=True))
    assert ray(CAMERA.resize(size), row, column) == pytest.approx(ray(CAMERA, *pixel), abs=1e-9)


@given(pixels, st.integers(-20, 400), st.integers(-20, 500))
def test_crop_keeps_rays(pixel: tuple[float, float], top: int, left: int) -> None:
    camera = CAMERA.crop(top, left, 64, 48)
    assert camera.size == (64, 48)
    assert ray(camera, pixel[0] - top, pixel[1] - left) == pytest.approx(ray(CAMERA, *pixel), abs=1e-9)


@given(pixels)
def test_flip_mirrors_rays(pixel: tuple[float, float]) -> None:
    x, y = ray(CAMERA, *pixel)
    assert ray(CAMERA.hflip(), pixel[0], 639 - pixel[1]) == pytest.approx((-x, y), abs=1e-9)


def test_pad_is_a_crop_from_outside() -> None:
    camera = CAMERA.pad(left=3, top=5, right=7, bottom=11)
    assert camera.size == (496, 650)
    assert (camera.cx, camera.cy) == (CAMERA.cx + 3, CAMERA.cy + 5)


def test_unequal_scaling_gives_the_mean_focal_length() -> None:
    camera = Camera(500.0, 500.0, 320.0, 240.0, (480, 640)).scale(0.5, 2.0)
    assert camera.size == (240, 1280)
    assert camera.focal == pytest.approx((250 + 1000) / 2)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "wrong",
    [{"fx": 0.0}, {"fy": -1.0}, {"fx": NAN}, {"fy": INF}, {"cx": NAN}, {"size": (0, 640)}, {"size": (12.7, 640)}],
)
def test_wrong_cameras_are_refused(wrong: dict[str, object]) -> None:
    values = {"fx": 500.0, "fy": 500.0, "cx": 320.0, "cy": 240.0, "size": (480, 640), **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Camera(**values)  # type: ignore[arg-type]


def test_depth_units() -> None:
    raw = torch.tensor([0, 2500], dtype=torch.uint16)
    for unit, metres in (("mm", 2.5), ("0.1mm", 0.25), ("1/5000m", 0.5), ("m", 2500.0), (0.002, 5.0)):
        assert to_metres(raw, unit).tolist() == pytest.approx([0.0, metres])
    with pytest.raises(ValueError, match="unit"):
        to_metres(raw, "inch")
    with pytest.raises(ValueError, match="unit"):
        to_metres(raw, -1.0)


@pytest.mark.parametrize("unit", [None, ["mm"]])
def test_a_unit_of_another_type_is_named(unit: object) -> None:
    with pytest.raises(ValueError, match="unit must be metres per count or one of m, mm"):
        to_metres(torch.ones(1), unit)  # type: ignore[arg-type]


def test_a_size_may_be_a_list() -> None:
    given: Any = [480, 640]
    assert replace(CAMERA, size=given) == CAMERA


@pytest.mark.parametrize("kind", [">u2", "<u2", "f4"])
def test_counts_of_any_byte_order_and_direction(kind: str) -> None:
    counts = np.array([[0, 1500], [3000, 4500]], kind)
    torch.testing.assert_close(to_metres(counts[:, ::-1], "mm"), torch.tensor([[1.5, 0.0], [4.5, 3.0]]))


@pytest.mark.parametrize("kind", [">u2", "u2", "f4"])
def test_masked_counts_are_unknown_depth(kind: str) -> None:
    counts = np.ma.masked_equal(np.array([[0, 1500], [65535, 4500]], kind), 65535)
    torch.testing.assert_close(to_metres(counts, "mm"), torch.tensor([[0.0, 1.5], [0.0, 4.5]]))
