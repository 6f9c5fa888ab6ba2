"""Laws of inference: what must not change anything, and what the network must be shown."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.toys import Columns, Depths, scenes
from malleable.data import collate, eval_transform
from malleable.inference.probabilities import _windows, probabilities
from malleable.runs.scores import Protocol

SAMPLE = scenes()[1]
CLASSES = len(scenes().classes)


def plain(net: Depths) -> torch.Tensor:
    batch = collate([eval_transform()(SAMPLE)])
    with torch.no_grad():
        return net(batch.image, batch.depth, batch.focal).softmax(1)[0]


def test_one_scale_is_the_network_alone() -> None:
    net = Depths(CLASSES)
    assert probabilities(net, SAMPLE).equal(plain(net))


def test_mirroring_changes_nothing_in_a_network_that_mirrors() -> None:
    net = Depths(CLASSES)
    torch.testing.assert_close(probabilities(net, SAMPLE, Protocol(flip=True)), plain(net))


def test_mirrored_answers_are_mirrored_back_and_averaged() -> None:
    net = Columns(CLASSES)
    batch = collate([eval_transform()(SAMPLE)])
    with torch.no_grad():
        mirrored = net(batch.image.flip(-1), batch.depth.flip(-1), batch.focal).softmax(1)[0].flip(-1)
    torch.testing.assert_close(probabilities(net, SAMPLE, Protocol(flip=True)), (plain(net) + mirrored) / 2)
    assert not torch.allclose(plain(net), mirrored)


@pytest.mark.parametrize("window", [(24, 32), (99, 99)])
def test_a_window_as_large_as_the_image_is_the_whole_image(window: tuple[int, int]) -> None:
    net = Columns(CLASSES)
    assert probabilities(net, SAMPLE, Protocol(window=window)).equal(plain(net))
    assert [shape[-2:] for shape, _ in net.calls] == [(24, 32)] * 2


def test_windows_change_nothing_in_a_network_that_sees_single_pixels() -> None:
    net = Depths(CLASSES)
    torch.testing.assert_close(probabilities(net, SAMPLE, Protocol(window=(11, 9))), plain(net))
    focal = SAMPLE.camera.focal
    assert all(shape[-2:] == (11, 9) and seen == [pytest.approx(focal)] for shape, seen in net.calls[:-1])


def test_overlapping_windows_are_averaged() -> None:
    """Columns adds its own column x/10 to class 0: where windows at 0 and 8 overlap it is the mean of x and x - 8."""
    net = Columns(CLASSES)
    with torch.no_grad():
        net.weight.zero_()
    scores = probabilities(net, SAMPLE, Protocol(window=(24, 24), overlap=0.5))
    x = torch.arange(32.0)
    first, second = x, x - 8
    column = torch.where(x < 8, first, torch.where(x < 24, (first + second) / 2, second)) / 10
    logits = torch.cat([column.expand(1, 24, 32), torch.zeros(CLASSES - 1, 24, 32)])
    torch.testing.assert_close(scores, logits.softmax(0))


def test_the_camera_and_depth_follow_the_scale() -> None:
    net = Depths(CLASSES)
    seen = []
    net.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["depth"]), with_kwargs=True)
    scores = probabilities(net, SAMPLE, Protocol(scales=(0.5, 1.0, 1.5)))
    focal = SAMPLE.camera.focal
    assert [shape[-2:] for shape, _ in net.calls] == [(12, 16), (24, 32), (36, 48)]
    assert [f for _, (f,) in net.calls] == pytest.approx([focal / 2, focal, focal * 1.5])
    values = set(SAMPLE.depth.flatten().tolist())
    assert all(set(depth.flatten().tolist()) <= values for depth in seen)  # sampled, never mixed
    assert scores.shape == (CLASSES, 24, 32)
    torch.testing.assert_close(scores.sum(0), torch.ones(24, 32))


def test_scales_are_averaged_as_probabilities() -> None:
    net = Depths(CLASSES)
    alone = [probabilities(net, SAMPLE, Protocol(scales=(scale,))) for scale in (0.5, 1.5)]
    torch.testing.assert_close(probabilities(net, SAMPLE, Protocol(scales=(0.5, 1.5))), sum(alone) / 2)


@given(st.integers(1, 300), st.integers(1, 120), st.floats(0, 0.9))
def test_windows_reach_both_borders_and_overlap_enough(length: int, window: int, overlap: float) -> None:
    slices = list(_windows(length, window, overlap))
    assert slices[0].start == 0
    assert slices[-1].stop == length
    assert all(s.stop - s.start == min(window, length) for s in slices)
    for one, other in pairwise(slices):
        assert one.start < other.start <= one.stop
        assert one.stop - other.start >= min(overlap * window, window - 1)


@pytest.mark.parametrize(
    ("protocol", "text"),
    [
        (Protocol(), "single scale"),
        (Protocol(scales=(0.5,)), "single scale 0.5"),
        (Protocol(flip=True), "single scale + flip"),
        (Protocol(scales=(0.75, 1.0), flip=True), "multi-scale 0.75, 1 + flip"),
        (Protocol(window=(480, 640)), "single scale, windows of 480×640"),
        (Protocol(window=(480, 640), overlap=0.5), "single scale, windows of 480×640 that overlap by 0.5"),
    ],
)
def test_a_protocol_names_itself(protocol: Protocol, text: str) -> None:
    assert str(protocol) == text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scales": ()}, "scales must be positive"),
        ({"scales": (0.0,)}, "scales must be positive"),
        ({"window": (0, 4)}, "window must be"),
        ({"overlap": 1.0}, "overlap must be"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Protocol(**options)  # type: ignore[arg-type]
