from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import malleable as mb
from malleable.functional import relative_depth
from malleable.geometry import grid_unit
from malleable.ops.window import Window

WINDOW = Window.of(3, 1, 1)


def depth_map(height: int, width: int, batch: int = 1) -> torch.Tensor:
    return 1 + torch.rand(batch, 1, height, width, dtype=torch.float64)


@pytest.mark.parametrize("rate", range(1, 17))
def test_depth_is_sampled_where_features_are_centered(rate: int) -> None:
    depth = depth_map(16 * rate + 1 + rate // 2, 20 * rate - rate // 3)
    expected = depth[..., ::rate, ::rate]
    sampled, found = mb.Geometry(depth, 100.0).depth_at(expected.shape[-2:], torch.float64)
    assert found == rate
    assert torch.equal(sampled, expected)


def test_a_nearer_neighbour_is_positive() -> None:
    depth = torch.tensor([[[[2.0, 2.0, 1.0]]]])
    d = relative_depth(depth, 10.0, kernel_size=(1, 3), padding=(0, 1)).value
    # unit = rate · dilation · depth / f = 2 / 10 at the middle pixel
    assert d[0, :, 0, 1].tolist() == pytest.approx([0.0, 0.0, 1.0 / 0.2])


@given(st.floats(0.01, 100.0))
def test_scaling_depth_changes_nothing(factor: float) -> None:
    """d is relative: a scene twice as far and twice as large looks the same."""
    depth = depth_map(8, 9)
    a = relative_depth(depth, 50.0, 3, padding=1).value
    b = relative_depth(depth * factor, 50.0, 3, padding=1).value
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(st.integers(2, 9), st.integers(2, 9), st.sampled_from([1, 2, 4]))
def test_resizing_image_depth_and_camera_together_keeps_d(height: int, width: int, rate: int) -> None:
    image = (height * rate, width * rate)
    depth, camera = depth_map(*image), mb.Camera(60.0, 64.0, 7.0, 6.0, image)
    doubled = depth.repeat_interleave(2, -1).repeat_interleave(2, -2)
    larger = camera.resize((2 * image[0], 2 * image[1]))
    a = relative_depth(depth, camera.focal, 3, padding=1, size=(height, width)).value
    b = relative_depth(doubled, larger.focal, 3, padding=1, size=(height, width)).value
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("dilation", "metres"), [(1, 0.16), (3, 0.48), ((1, 4), 0.4)])
def test_a_step_of_one_unit_is_a_difference_of_one(dilation: int | tuple[int, int], metres: float) -> None:
    assert grid_unit(2.0, 50.0, rate=4, dilation=dilation) == pytest.approx(metres)
    depth = torch.full((1, 1, 32, 64), 2.0, dtype=torch.float64)
    depth[..., 32:] -= metres
    d = relative_depth(depth, 50.0, (1, 3), dilation=dilation, size=(8, 16)).value
    assert d.max().item() == pytest.approx(1.0)


def test_dilation_and_rate_widen_the_unit() -> None:
    depth = depth_map(24, 24)
    plain = relative_depth(depth, 50.0, 3, padding=1).value
    ramp = relative_depth(depth, 50.0, 3, padding=2, dilation=2).value
    same_pixels = relative_depth(depth[..., ::2, ::2], 50.0, 3, padding=1).value
    torch.testing.assert_close(ramp[..., ::2, ::2] * 2, same_pixels)
    by_rate = relative_depth(depth, 50.0, 3, padding=1, size=(12, 12)).value
    torch.testing.assert_close(by_rate * 2, same_pixels)
    assert plain.shape == (1, 9, 24, 24)


@pytest.mark.parametrize("hole", [0.0, -3.0, torch.nan, torch.inf, -torch.inf])
def test_holes_are_the_same_depth_and_marked(hole: float) -> None:
    depth = depth_map(5, 5)
    depth[0, 0, 2, 2] = hole
    d, valid = relative_depth(depth, 50.0, 3, padding=1)
    assert torch.isfinite(d).all()
    assert not valid[0, :, 2, 2].any()  # nothing is known around a center without depth
    assert not valid[0, 0, 3, 3]  # nor of a tap without depth
    assert (d[~valid] == 0).all()
    inside = valid[0, :, 1:-1, 1:-1]
    assert inside.sum() == 9 * 9 - 9 - 8


def test_layers_share_and_batches_do_not() -> None:
    geometry = mb.Geometry(depth_map(8, 8), 50.0)
    first = geometry.relative_depth(WINDOW, (4, 4)).value
    assert geometry.relative_depth(WINDOW, (4, 4)).value is first
    assert geometry.relative_depth(WINDOW, (4, 4), torch.float64).value.dtype == torch.float64
    other = mb.Geometry(depth_map(8, 8), 50.0)
    assert not torch.equal(other.relative_depth(WINDOW, (4, 4)).value, first)


def test_one_geometry_serves_two_backward_passes() -> None:
    depth = depth_map(8, 8).requires_grad_()
    geometry = mb.Geometry(depth, 50.0)
    for _ in range(2):
        geometry.relative_depth(WINDOW, (8, 8)).value.sum().backward()


def test_focal_lengths_can_learn() -> None:
    focal = torch.tensor([50.0], requires_grad=True)
    geometry = mb.Geometry(depth_map(8, 8), focal)
    with torch.no_grad():
        geometry.relative_depth(WINDOW, (8, 8))
    for _ in range(2):
        geometry.relative_depth(WINDOW, (8, 8)).value.square().sum().backward()
    assert focal.grad is not None
    assert focal.grad > 0


def test_what_inference_mode_cached_does_not_reach_training() -> None:
    geometry = mb.Geometry(depth_map(8, 8), 50.0)
    layer = mb.MalleableConv2d(2, 2, 3, padding=1)
    x = torch.rand(1, 2, 8, 8)
    with torch.inference_mode():
        layer(x, geometry)
    layer(x, geometry).sum().backward()


def test_copies_and_pickles_leave_the_cache_behind() -> None:
    geometry = mb.Geometry(depth_map(8, 8), torch.tensor([50.0]))
    d = geometry.relative_depth(WINDOW, (8, 8)).value
    for other in (copy.deepcopy(geometry), pickle.loads(pickle.dumps(geometry)), geometry.to("cpu")):
        assert torch.equal(other.relative_depth(WINDOW, (8, 8)).value, d)


@pytest.mark.parametrize(
    ("depth", "focal", "named"),
    [
        (torch.ones(2, 8, 8), 50.0, "depth"),
        (torch.ones(2, 3, 8, 8), 50.0, "depth"),
        (torch.ones(2, 1, 8, 8), 0.0, "focal"),
        (torch.ones(2, 1, 8, 8), -5.0, "focal"),
        (torch.ones(2, 1, 8, 8), float("nan"), "focal"),
        (torch.ones(2, 1, 8, 8), torch.tensor([50.0, 0.0]), "focal"),
        (torch.ones(2, 1, 8, 8), torch.tensor([50.0, 50.0, 50.0]), "focal"),
        (torch.ones(2, 1, 8, 8), torch.ones(2, 1), "focal"),
    ],
)
def test_wrong_geometry_is_refused(depth: torch.Tensor, focal: float | torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        mb.Geometry(depth, focal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
def test_a_focal_length_has_the_precision_of_depth(dtype: torch.dtype) -> None:
    """An array of NumPy's is float64, which would make everything after it slow."""
    geometry = mb.Geometry(torch.ones(2, 1, 8, 8), torch.tensor([50, 60], dtype=dtype))
    assert geometry.focal.dtype == torch.float32
    assert mb.Geometry(torch.ones(2, 1, 8, 8).double(), geometry.focal).focal.dtype == torch.float64


def test_a_focal_length_may_be_a_number_of_numpy() -> None:
    assert mb.Geometry(torch.ones(1, 1, 8, 8), np.float32(50)).focal.tolist() == [50.0]


def test_counts_are_not_metres() -> None:
    with pytest.raises(TypeError, match="focal must be a number or a tensor, got list"):
        mb.Geometry(torch.ones(1, 1, 8, 8), [50.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="to_metres"):
        mb.Geometry(torch.ones(1, 1, 8, 8, dtype=torch.int32), 50.0)


def test_a_focal_length_that_could_not_be_checked_makes_no_nan() -> None:
    """On an accelerator the check would stall; there a wrong one means no depth instead."""
    depth = depth_map(6, 6, batch=3).requires_grad_()
    geometry = mb.Geometry(depth, 50.0)
    geometry.focal = torch.tensor([0.0, torch.inf, torch.nan])
    d, valid = geometry.relative_depth(WINDOW, (6, 6))
    d.sum().backward()
    assert not valid.any()
    assert (d == 0).all()
    assert depth.grad is not None
    assert torch.isfinite(depth.grad).all()


def test_depth_of_eight_bits_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="depth is bfloat16"):
        mb.Geometry(torch.ones(1, 1, 4, 4, dtype=torch.bfloat16), 5.0)


def test_depth_that_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match="depth must be a tensor, got ndarray"):
        relative_depth(torch.ones(1, 1, 4, 4).numpy(), 10.0, 3)  # type: ignore[arg-type]


def test_a_geometry_without_numbers_can_be_shown() -> None:
    geometry = mb.Geometry(torch.ones(2, 1, 4, 6, device="meta"), 10.0)
    assert repr(geometry) == "Geometry(depth=(2, 1, 4, 6), focal=(2,))"


@pytest.mark.parametrize("kernel", [3, 6])
def test_a_map_smaller_than_the_kernel_is_refused(kernel: int) -> None:
    with pytest.raises(ValueError, match=f"a map of 2×2 is smaller than kernel_size {kernel}: add padding"):
        relative_depth(torch.ones(1, 1, 2, 2), 50.0, kernel)
