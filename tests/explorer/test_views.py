"""What the page is told to draw, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from helpers.toys import scenes
from malleable.explorer.explorer import Explorer, Scene, Source
from malleable.explorer.layer import Layer, look
from malleable.explorer.scenes import Fault, items_of
from malleable.explorer.views import view

SAMPLE = scenes()[1]
PIXEL = (14, 10)


def test_every_tap_on_the_image_is_told_with_its_shares() -> None:
    layer = Layer(rate=2, dilation=3)
    told, seen = view(layer, SAMPLE, PIXEL), look(layer, SAMPLE, PIXEL)
    assert [(tap["x"], tap["y"]) for tap in told["taps"]] == [tuple(at) for at in seen.taps[seen.inside].tolist()]
    assert torch.tensor([tap["g"] for tap in told["taps"]]).T.numpy() == pytest.approx(seen.g[:, seen.inside], abs=1e-4)
    assert [kernel["label"] for kernel in told["kernels"]] == ["behind", "same depth", "in front"]
    assert sum(kernel["share"] for kernel in told["kernels"]) == pytest.approx(
        seen.g[:, seen.inside].sum(0).mean(), abs=1e-3
    )
    json.dumps(told, allow_nan=False)


def test_each_answer_has_another_number() -> None:
    assert view(Layer(), SAMPLE, PIXEL)["number"] != view(Layer(), SAMPLE, PIXEL)["number"]


def test_the_scale_of_depth_changes_no_share() -> None:
    near, far = (view(Layer(rate=1), Fault(times=times)(SAMPLE), PIXEL) for times in (1.0, 4.0))
    assert [tap["g"] for tap in near["taps"]] == [tap["g"] for tap in far["taps"]]
    assert far["unit"] == pytest.approx(4 * near["unit"])


@pytest.mark.parametrize("conv", ["malleable", "conv25d", "depth_aware"])
def test_without_any_depth_there_is_nothing_to_turn_around(conv: str) -> None:
    layer = Layer(conv, kernels=1 if conv == "depth_aware" else 3)
    told = view(layer, Fault(unknown=1.0)(SAMPLE), PIXEL)
    assert told["pivot"] == []
    assert "has no depth" in told["said"]
    assert all(tap["depth"] is None and tap["d"] is None for tap in told["taps"])
    json.dumps(told, allow_nan=False)


def test_a_pixel_without_depth_turns_around_what_is_near() -> None:
    depth = torch.full((1, 24, 32), 2.0)
    depth[0, PIXEL[1], PIXEL[0]] = 0
    told = view(Layer(rate=1, dilation=1), replace(SAMPLE, depth=depth), PIXEL)
    assert told["pivot"] == [*PIXEL, 2.0]


@pytest.mark.parametrize("corner", [(-5, -5), (99, 99), (31, 0)])
def test_any_click_is_a_pixel(corner: tuple[int, int]) -> None:
    x, y = view(Layer(rate=4), SAMPLE, corner)["pixel"]
    assert 0 <= x < 32
    assert 0 <= y < 24
    assert (x % 4, y % 4) == (0, 0)


def test_scenes_are_picked_by_number_and_spoilt_without_a_trace() -> None:
    data = scenes()
    explorer = Explorer({"rooms": Source(items_of(data), data.classes)}, {}, {})
    scene = explorer.pick("rooms", 2, Layer())
    assert scene.clean.id == data.ids[2]
    spoilt = scene.spoilt(Fault(unknown=1.0), 2 * scene.clean.camera.focal)
    assert not spoilt.shown.depth.any()
    assert spoilt.shown.camera.focal == pytest.approx(2 * data[2].camera.focal)
    assert torch.equal(spoilt.clean.depth, data[2].depth)
    assert spoilt.refocused(5.0).shown.camera.focal == pytest.approx(5.0)


def test_a_scene_begins_where_neighbours_differ() -> None:
    depth = torch.full((1, 24, 32), 2.0)
    depth[..., 20:] = 2.05
    x, _ = Scene.of(replace(SAMPLE, depth=depth), Layer(taps=3, dilation=1, rate=1)).pixel
    assert x in (19, 20)
