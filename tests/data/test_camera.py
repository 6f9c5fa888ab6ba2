"""What data adds to the camera: files, vertical flips, back-projection."""

from __future__ import annotations

import pytest
import torch

from malleable import Camera

CAMERA = Camera(100.0, 110.0, 20.0, 15.0, (30, 40))


def test_dictionary_round_trip():
    assert Camera.from_dict(CAMERA.to_dict()) == CAMERA


@pytest.mark.parametrize("broken", [{"fx": None}, {"cy": "7"}, {"width": float("nan")}, {"fy": True}])
def test_a_broken_dictionary_is_named(broken):
    with pytest.raises(ValueError, match=next(iter(broken))):
        Camera.from_dict({**CAMERA.to_dict(), **broken})


def test_back_projection_by_hand():
    points = CAMERA.back_project(torch.full((30, 40), 2.0))
    assert points[:, 15, 20].tolist() == [0.0, 0.0, 2.0]
    assert points[:, 26, 30].tolist() == pytest.approx([2 * 10 / 100, 2 * 11 / 110, 2.0])


def test_back_projection_needs_the_cameras_size():
    with pytest.raises(ValueError, match=r"\(30, 40\)"):
        CAMERA.back_project(torch.ones(40, 30))


def test_vertical_flip_mirrors_the_principal_point():
    assert CAMERA.vflip().cy == 29 - 15
    assert CAMERA.vflip().vflip() == CAMERA
