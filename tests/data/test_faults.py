from __future__ import annotations

import pytest
import torch
from torch import Tensor

from malleable.data import SyntheticScenes, train_transform
from malleable.data.faults import STRESSES, DepthFaults, Stressed, holes, noise

SCENES = SyntheticScenes("rooms", size=(48, 64), length=3)
BY_NAME = {stress.name: stress for stress in STRESSES}


def depth_of(name: str, index: int = 1) -> Tensor:
    return Stressed(SCENES, BY_NAME[name])[index].depth.as_subclass(Tensor)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9, 1.0])
def test_holes_take_their_share_and_leave_the_rest_as_it_is(share: float) -> None:
    depth = torch.full((1, 50, 70), 2.0)
    spoiled = holes(depth, share, torch.Generator().manual_seed(0))
    assert float((spoiled == 0).float().mean()) == pytest.approx(share, abs=1e-3)
    assert set(spoiled.unique().tolist()) <= {0.0, 2.0}


def test_holes_are_patches() -> None:
    lost = holes(torch.ones(1, 96, 128), 0.5, torch.Generator().manual_seed(0)) == 0
    same = (lost[:, :, 1:] == lost[:, :, :-1]).float().mean()
    assert same > 0.85  # independent pixels would give 0.5


def test_noise_has_its_deviation_and_makes_nothing_known() -> None:
    depth = torch.full((1, 200, 200), 4.0)
    depth[:, :50] = 0
    noisy = noise(depth, metres=0.02, relative=0.01, random=torch.Generator().manual_seed(0))
    assert not noisy[:, :50].any()
    assert float((noisy - depth)[:, 50:].std()) == pytest.approx(0.06, rel=0.05)


def test_wide_noise_has_its_deviation_too_and_neighbours_share_it() -> None:
    depth = torch.full((1, 201, 203), 4.0)
    wide, single = (
        noise(depth, relative=0.01, random=torch.Generator().manual_seed(0), width=width) - depth for width in (4, 1)
    )
    for found in (wide, single):
        assert float(found.std()) == pytest.approx(0.04, rel=0.05)
    step, far = (float((wide[..., gap:] - wide[..., :-gap]).std()) for gap in (1, 12))
    assert step < 0.5 * far
    assert float((single[..., 1:] - single[..., :-1]).std()) == pytest.approx(far, rel=0.1)


def test_every_stress_is_the_same_whenever_it_is_read() -> None:
    for stress in STRESSES:
        data = Stressed(SCENES, stress)
        first, again = data[1], (data[2], data[1])[1]
        assert torch.equal(first.depth, again.depth), stress.name
        assert first.camera == again.camera
        original = SCENES[1]
        assert torch.equal(first.image, original.image)
        assert torch.equal(first.label, original.label)
        changed = not torch.equal(first.depth, original.depth) or first.camera != original.camera
        assert changed, stress.name
    assert len(BY_NAME) == len(STRESSES)


def test_what_the_stresses_do() -> None:
    depth = SCENES[1].depth.as_subclass(Tensor)
    known = depth > 0
    assert torch.equal(depth_of("depth × 4"), 4 * depth)
    ratio = (depth_of("depth × 0.1 … 10 at random") / depth)[known]
    assert 0.1 <= float(ratio.min()) <= float(ratio.max()) <= 10
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio))
    counts = depth_of("8 bits of the farthest")
    assert torch.equal(counts, counts.round())
    assert float(counts.max()) == 255
    assert float((counts / 255 * depth.max() - depth)[known].abs().max()) <= 0.51 * float(depth.max()) / 255
    assert torch.equal(depth_of("shifted by 4 pixels")[..., 4:], depth[..., :-4])
    assert not depth_of("no depth").any()
    for share in (0.5, 0.95):
        lost = (depth_of(f"{share:.0%} scattered") == 0)[known]
        assert float(lost.float().mean()) == pytest.approx(share, abs=0.03)
        assert not lost.all()
    camera = Stressed(SCENES, BY_NAME["focal length × 0.8"])[1].camera
    assert camera.focal == pytest.approx(0.8 * SCENES[1].camera.focal)
    assert not (depth_of("noise of a Kinect")[~known]).any()


def test_training_meets_faults_as_often_as_asked() -> None:
    transform = train_transform((48, 64), (1.0,), 0.0, DepthFaults(dropout=0.25, holes=0.5))
    scene = SCENES[1]
    torch.manual_seed(0)
    lost = [1 - float((transform(scene).depth > 0).sum() / (scene.depth > 0).sum()) for _ in range(400)]
    assert sum(share == 1 for share in lost) / 400 == pytest.approx(0.25, abs=0.06)
    assert sum(share == 0 for share in lost) / 400 == pytest.approx(0.375, abs=0.07)
    assert max(share for share in lost if share < 1) <= 0.97


@pytest.mark.parametrize("wrong", [{"dropout": -0.1}, {"holes": 30}, {"noise": float("nan")}])
def test_shares_are_not_percent(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be 0 to 1"):
        DepthFaults(**wrong)


def test_noise_in_training_is_of_the_depth_alone() -> None:
    sample = train_transform((48, 64), (1.0,), 0.0)(SCENES[1])
    noisy = train_transform((48, 64), (1.0,), 0.0, DepthFaults(noise=0.05))(SCENES[1])
    assert torch.equal(sample.image, noisy.image)
    assert torch.equal(sample.depth > 0, noisy.depth > 0)
    difference = (noisy.depth / sample.depth.clamp(min=1e-3) - 1).as_subclass(Tensor)[sample.depth > 0]
    assert 0 < float(difference.std()) < 0.055
