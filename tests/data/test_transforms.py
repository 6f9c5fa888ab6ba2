from __future__ import annotations

import pytest
import torch

from malleable import Camera
from malleable.data.sample import Sample, collate
from malleable.data.transforms import MEAN, SCALES, STD, RandomScale, eval_transform, train_transform

CAMERA = Camera(60.0, 62.0, 31.0, 23.0, (48, 64))


def sample(id: str = "x") -> Sample:
    image = torch.full((3, 48, 64), 200, dtype=torch.uint8)
    return Sample(image, torch.full((1, 48, 64), 2.0), torch.ones(48, 64, dtype=torch.int64), CAMERA, id)


def test_training_draws_every_scale_of_the_paper_and_the_focal_length_follows():
    torch.manual_seed(0)
    transform = train_transform(crop=(40, 40))
    scales = set()
    for _ in range(200):
        after = transform(sample())
        assert after.image.shape == (3, 40, 40)
        assert after.camera.size == (40, 40)
        scales.add(after.camera.fx / CAMERA.fx)
    assert scales == set(SCALES)


def test_training_flips_half_of_the_time():
    torch.manual_seed(0)
    transform = train_transform(crop=(48, 64), scales=(1.0,))
    flipped = sum(transform(sample()).camera.cx != CAMERA.cx for _ in range(200))
    assert 70 < flipped < 130


def test_a_border_is_grey_unknown_and_ignored():
    torch.manual_seed(0)
    after = train_transform(crop=(96, 96), scales=(0.75,))(sample())
    border = after.label == 255
    assert border.sum() >= 96 * 96 - 36 * 48
    assert (after.depth[0][border] == 0).all()
    assert (after.depth[0][~border] == 2).all()
    assert after.image[:, border].abs().max() < 0.02  # the mean colour, so 0 once normalised


def test_evaluation_normalises_and_nothing_else():
    after = eval_transform()(sample())
    expected = [(200 / 255 - mean) / std for mean, std in zip(MEAN, STD, strict=True)]
    assert after.image[:, 3, 5].tolist() == pytest.approx(expected, abs=1e-6)
    assert after.camera == CAMERA
    assert torch.equal(after.depth, sample().depth)


@pytest.mark.parametrize("scales", [(), (0.5, 0.0), (-1.0,)])
def test_scales_must_be_positive(scales):
    with pytest.raises(ValueError, match="scales"):
        RandomScale(scales)


def test_a_batch_has_plain_tensors_focal_lengths_and_ids():
    batch = collate([eval_transform()(sample("a")), eval_transform()(sample("b"))])
    assert [tuple(t.shape) for t in batch[:4]] == [(2, 3, 48, 64), (2, 1, 48, 64), (2, 48, 64), (2,)]
    assert all(type(t) is torch.Tensor for t in batch[:4])
    assert batch.focal.tolist() == [61.0, 61.0]
    assert batch.ids == ["a", "b"]


def test_a_batch_of_two_sizes_is_refused_by_name():
    other = train_transform(crop=(20, 20))(sample("small"))
    with pytest.raises(ValueError, match="big, small"):
        collate([eval_transform()(sample("big")), other])


def test_a_batch_of_bytes_is_refused():
    with pytest.raises(TypeError, match="normalised"):
        collate([sample()])


def test_a_sample_of_depth_counts_is_refused():
    with pytest.raises(TypeError, match="to_metres"):
        Sample(sample().image, torch.ones(1, 48, 64, dtype=torch.int32), sample().label, CAMERA, "x")


def test_a_sample_of_wrong_shapes_is_refused():
    with pytest.raises(ValueError, match="depth must be"):
        Sample(sample().image, torch.ones(48, 64), sample().label, CAMERA, "x")
