from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from malleable.geometry import integer_rate, sample_positions

CPU = torch.device("cpu")


def ceil_div(n: int, d: int) -> int:
    return -(-n // d)


@given(st.integers(1, 32), st.integers(200, 1100), st.integers(200, 1100))
def test_the_rate_is_found_again(rate: int, height: int, width: int) -> None:
    size = (ceil_div(height, rate), ceil_div(width, rate))
    found = integer_rate((height, width), size)
    assert found is not None
    if rate in (16, 32) or (rate < 16 and min(size) > rate + 1):  # no other integer fits then
        assert found == rate
    elif found not in (16, 32):
        assert (ceil_div(height, found), ceil_div(width, found)) == size


@given(st.integers(4, 6), st.integers(1, 2000), st.integers(1, 2000), st.booleans())
def test_coarse_maps_of_networks_that_halve_rounding_up_or_down(n: int, height: int, width: int, up: bool) -> None:
    size = tuple(ceil_div(side, 2**n) if up else side // 2**n for side in (height, width))
    if min(size) > 1:  # a side of one pixel fits them all
        assert integer_rate((height, width), size) == 2**n


def test_a_map_that_was_rounded_down_leaves_pixels_over() -> None:
    """ConvNeXt's last stage on 240 × 320: 32 · 7 = 224. By ceil(240 / r) = 7 and ceil(320 / r) = 10 it would be 35."""
    rate, rows, columns = sample_positions((240, 320), (7, 10), CPU)
    assert (rate, torch.arange(240)[rows].tolist()) == (32, list(range(0, 224, 32)))
    assert torch.arange(320)[columns].tolist() == list(range(0, 320, 32))


@given(st.integers(1, 64), st.integers(1, 64), st.integers(200, 6000))
def test_also_of_maps_that_are_one_pixel_high(height: int, more: int, width: int) -> None:
    rate = height + more
    size = (1, ceil_div(width, rate))
    found = integer_rate((height, width), size)
    assert found is not None
    if found < 16:
        assert (ceil_div(height, found), ceil_div(width, found)) == size
        if size[1] > rate + 1:
            assert found == rate


@pytest.mark.parametrize("size", [(225, 300), (450, 600), (33, 65), (481, 641), (427, 561)])
@pytest.mark.parametrize("halvings", range(6))
def test_networks_that_halve_their_maps(size: tuple[int, int], halvings: int) -> None:
    feature = size
    for _ in range(halvings):
        feature = (ceil_div(feature[0], 2), ceil_div(feature[1], 2))
    assert integer_rate(size, feature) == 2**halvings


@given(st.integers(1, 14), st.integers(8, 20), st.integers(1, 20))
def test_exact_ratios_go_before_others_than_coarse_powers(rate: int, height: int, width: int) -> None:
    assert integer_rate((rate * height, rate * width), (height, width)) == rate


def test_maps_without_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one pixel"):
        integer_rate((0, 4), (0, 2))


def test_no_integer_rate_takes_the_nearest_pixel() -> None:
    rate, rows, columns = sample_positions((10, 15), (4, 6), CPU)
    assert rate == 2.5
    assert rows.tolist() == [0, 2, 5, 7]
    assert columns.tolist() == [0, 2, 5, 7, 10, 12]


@pytest.mark.parametrize("size", [(481, 640), (60, 160), (80, 60), (1, 640)])
def test_sizes_that_cannot_belong_together(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{size[0]}×{size[1]} cannot come from an image of 480×640"):
        sample_positions((480, 640), size, CPU)


def test_networks_without_padding_are_allowed() -> None:
    """Three unpadded 3×3 convolutions with stride 2 shrink more than by a rate."""
    rate, rows, _ = sample_positions((480, 640), (58, 78), CPU)
    assert rate == pytest.approx(480 / 58, rel=0.02)
    assert rows.max() < 480


def test_compiled_graphs_choose_alike() -> None:
    sizes = [(h, w) for h, w in itertools.product((1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 24), repeat=2)]
    for image in [(24, 24), (30, 33), (225, 225), (97, 129), (8, 256), (256, 8), (3, 5000), (3000, 3100), (240, 320)]:
        for size in sizes:
            try:
                rate, rows, columns = sample_positions(image, size, CPU)
            except ValueError:
                continue
            with mock.patch("torch.compiler.is_compiling", return_value=True):
                exported = sample_positions(image, size, CPU)
            if isinstance(rows, slice):
                rows, columns = (torch.arange(n)[taken] for n, taken in zip(image, (rows, columns), strict=True))
            assert exported[0] == pytest.approx(rate)
            assert exported[1].tolist() == rows.tolist()
            assert exported[2].tolist() == columns.tolist()
