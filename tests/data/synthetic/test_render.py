"""The ray caster against points tested one by one, and sensors against their own statistics."""

from __future__ import annotations

import numpy as np
import pytest

from malleable.data.synthetic import rooms, streets
from malleable.data.synthetic.render import Light, Material, Scene, Solid, View, render
from malleable.data.synthetic.sensor import kinect, stereo

GREY = Material(np.full(3, 0.5), np.full(3, 0.5), 0, (1.0, 1.0), (0.0, 0.0))


def contains(solid: Solid, points: np.ndarray, margin: float) -> np.ndarray:
    """Which world points (..., 3) are inside ``solid`` grown by ``margin`` metres: its definition, without rays."""
    half = np.array(solid.half) + margin
    if half.min() <= 0:
        return np.zeros(points.shape[:-1], bool)
    c, s = np.cos(solid.yaw), np.sin(solid.yaw)
    x, y, z = np.moveaxis(points - np.array(solid.center), -1, 0)
    x, y, z = ((c * x - s * z) / half[0], y / half[1], (s * x + c * z) / half[2])
    if solid.shape == "ellipsoid":
        return x * x + y * y + z * z < 1
    round_ = x * x + z * z < 1 if solid.shape == "cylinder" else (abs(x) < 1) & (abs(z) < 1)
    return round_ & (abs(y) < 1)


@pytest.mark.parametrize("world", [rooms, streets])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_ray_ends_at_the_first_surface_it_meets(world, seed):
    scene = world.layout(np.random.default_rng(seed), (24, 32))
    seen = render(scene)
    rays = scene.view.rays().astype(np.float64).transpose(1, 2, 0)
    hit = np.isfinite(seen.depth)
    ends = np.where(hit, seen.depth, 150.0)
    eye = np.array(scene.view.position)
    labels_here = np.zeros(hit.shape, bool)
    for solid in scene.solids:
        at_end = eye + rays * ends[..., None]
        if solid.inside:
            assert contains(solid, at_end, 0.001).all()
            on_it = ~contains(solid, at_end, -0.001)
        else:
            on_it = contains(solid, at_end, 0.01) & ~contains(solid, at_end, -0.01)
            for share in np.linspace(0.02, 0.98, 60):
                assert not contains(solid, eye + share * rays * ends[..., None], -0.01).any()
        labels = solid.label if isinstance(solid.label, tuple) else (solid.label,)
        labels_here |= on_it & np.isin(seen.label, labels)
    assert (labels_here | ~hit).all()


def test_a_box_straight_ahead_by_hand():
    view = View((5, 5), focal=10.0, position=(0.0, 0.0, 0.0), yaw=0.0, pitch=0.0)
    box = Solid("box", (0.0, 0.0, 5.0), (0.45, 0.45, 1.0), 0.0, 3, GREY)
    seen = render(Scene(view, [box], Light((0.0, 9.0, 0.0), np.ones(3), 0.5), np.zeros(3)))
    expected = np.full((5, 5), np.inf)
    expected[1:4, 1:4] = 4.0  # 0.45 m at 4 m are 1.1 pixels
    np.testing.assert_allclose(seen.depth, expected, rtol=1e-6)
    assert (seen.label == np.where(np.isinf(expected), -1, 3)).all()


def test_a_lamp_overhead_casts_a_shadow_on_the_floor():
    view = View((40, 40), focal=30.0, position=(0.0, 2.0, 0.0), yaw=0.0, pitch=0.5)
    floor = Solid("box", (0.0, -0.5, 3.0), (9.0, 0.5, 9.0), 0.0, 0, GREY)
    plate = Solid("box", (0.0, 1.0, 3.0), (0.4, 0.05, 0.4), 0.0, 1, GREY)
    light = Light((0.0, 8.0, 3.0), np.ones(3), 0.3)
    bare, shaded = (render(Scene(view, solids, light, np.zeros(3))) for solids in ([floor], [floor, plate]))
    darker = (shaded.colour.mean(axis=2) < 0.8 * bare.colour.mean(axis=2)) & (shaded.label == 0)
    rays = view.rays()
    x, z = (rays[axis] * shaded.depth + np.array(view.position)[axis] for axis in (0, 2))
    under = (abs(x) < 0.4 * 8 / 7) & (abs(z - 3) < 0.4 * 8 / 7) & (shaded.label == 0)
    assert under.any()
    assert (darker == under).mean() > 0.97  # shadows are traced for every other pixel


def test_kinect_noise_grows_with_the_square_of_depth():
    random = np.random.default_rng(0)
    spread = [np.std(kinect(np.full((200, 200), z, np.float32), 130.0, random)) for z in (1.0, 2.0, 4.0, 8.0)]
    expected = [0.0012 + 0.0019 * (z - 0.4) ** 2 for z in (1.0, 2.0, 4.0, 8.0)]
    np.testing.assert_allclose(spread, expected, rtol=0.05)


def test_kinect_is_blind_too_near_too_far_and_beside_edges():
    depth = np.full((60, 80), 4.0, np.float32)
    depth[:, 40:] = 1.5
    depth[0], depth[1] = 0.3, 12.0
    seen = kinect(depth, 130.0, np.random.default_rng(0))
    assert (seen[:2] == 0).all()
    holes = (seen[3:] == 0).mean(axis=0)
    shadow = 0.075 * 130 * (1 / 1.5 - 1 / 4)  # pixels that the nearer half hides from the projector
    assert holes[40 - int(shadow) : 40].all()
    assert (holes[: 40 - int(shadow) - 2] == 0).all()
    assert (holes[42:] == 0).all()
    assert 0.2 < holes[40] < 0.6


def test_stereo_noise_is_constant_in_disparity_and_far_is_invalid():
    random, focal, width = np.random.default_rng(0), 177.0, 160
    for z in (5.0, 20.0, 60.0):
        seen = stereo(np.full((200, width), z, np.float32), focal, width, random)
        disparity = 0.21 * focal / seen[seen > 0]
        assert np.std(disparity) == pytest.approx(0.5 * width / 2048, rel=0.05)
    for z in (400.0, np.inf):
        assert (stereo(np.full((50, width), z, np.float32), focal, width, random) == 0).mean() > 0.97
