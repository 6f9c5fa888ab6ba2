from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from malleable.ops.window import Window

small = st.integers(1, 3)


@given(st.tuples(st.integers(1, 5), st.integers(1, 5)), st.tuples(small, small), st.tuples(small, small))
def test_views_are_what_unfold_reads(
    kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> None:
    x = torch.randn(2, 3, 14, 15)
    window = Window.of(kernel, stride, (1, 2), dilation)
    unfolded = F.unfold(x, kernel, dilation, (1, 2), stride).view(2, 3, window.taps, *window.output_size((14, 15)))
    assert torch.equal(torch.stack(list(window.views(x)), 2), unfolded)


def test_a_window_that_fits_nowhere_has_empty_views() -> None:
    views = Window.of(3, 2, 0, 1).views(torch.ones(1, 1, 2, 2))
    assert {tuple(view.shape) for view in views} == {(1, 1, 0, 0)}


@given(st.integers(1, 6), st.integers(1, 6), small)
def test_same_padding_as_torch(kh: int, kw: int, dilation: int) -> None:
    x, weight = torch.randn(1, 1, 9, 11), torch.randn(1, 1, kh, kw)
    window = Window.of((kh, kw), 1, "same", dilation)
    ours = sum(w * view for w, view in zip(weight.flatten(), window.views(x), strict=True))
    torch.testing.assert_close(ours, F.conv2d(x, weight, padding="same", dilation=dilation), rtol=1e-4, atol=1e-4)


def test_the_center_of_even_kernels() -> None:
    assert Window.of((4, 2)).center == 2 * 2 + 1
    assert Window.of(3).center == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kernel_size": 0}, "kernel_size"),
        ({"kernel_size": (3, 3, 3)}, "kernel_size"),
        ({"kernel_size": 3, "stride": 0}, "stride"),
        ({"kernel_size": 3, "padding": -1}, "padding"),
        ({"kernel_size": 3, "padding": "reflect"}, "padding"),
        ({"kernel_size": 3, "padding": "same", "stride": 2}, "stride"),
        ({"kernel_size": 3, "dilation": 1.5}, "dilation"),
    ],
)
def test_wrong_windows_are_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Window.of(**arguments)  # type: ignore[arg-type]
