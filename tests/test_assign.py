from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import malleable as mb
from malleable.functional import depth_aware_assign, hard_assign, malleable_assign, malleable_logits

DEFAULT = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)


def layer(kernels: int, **options: object) -> mb.MalleableConv2d:
    return mb.MalleableConv2d(1, 1, 1, kernels=kernels, dtype=torch.float64, **options)  # type: ignore[arg-type]


@given(
    st.integers(1, 6),
    st.floats(1e-3, 1e3),
    st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=20),
    st.integers(0, 2**31),
)
def test_shares_never_exceed_one(kernels: int, temperature: float, d: list[float], seed: int) -> None:
    """Eq. 4, for any centers, sorted or not."""
    centers = 3 * torch.randn(kernels + 2, generator=torch.Generator().manual_seed(seed))
    g = malleable_assign(torch.tensor([d]), centers, temperature)
    assert g.shape == (1, kernels, len(d))
    assert (g >= 0).all()
    assert (g.sum(1) <= 1 + 1e-6).all()


def test_values_at_initialisation() -> None:
    """Fig. 2 by hand: at d = 0, h = (−4, −1, 0, −1, −4)."""
    g = malleable_assign(torch.zeros(1, 1, dtype=torch.float64), DEFAULT, 1.0)[0, :, 0]
    e = torch.exp(torch.tensor([-4.0, -1.0, 0.0, -1.0, -4.0], dtype=torch.float64))
    torch.testing.assert_close(g, e[1:-1] / e.sum())


def test_the_outer_classes_are_borders() -> None:
    """h_0 grows without end behind, h_{K+1} in front: far pixels belong to no kernel."""
    d = torch.tensor([[-1e5, -10.0, 10.0, 1e5]], dtype=torch.float64)
    h = malleable_logits(d, DEFAULT, 1.0)[0]
    assert h[:, 0].argmax() == 0
    assert h[:, 3].argmax() == 4
    assert (malleable_assign(d, DEFAULT, 1.0) < 1e-12).all()


def test_a_nearer_neighbour_goes_to_a_positive_center() -> None:
    g = layer(3).receptive_field(torch.tensor([1.0, 0.0, -1.0]))
    assert g.argmax(0).tolist() == [2, 1, 0]


@pytest.mark.parametrize("kernels", [1, 2, 3, 5])
def test_cold_malleable_is_hard(kernels: int) -> None:
    """With default centers the borders between classes are those of Eq. 11, so t → 0 gives the 2.5D convolution."""
    d = torch.linspace(-4, 4, 400, dtype=torch.float64)  # no point on a border
    g = layer(kernels, temperature=1e-4).receptive_field(d)
    torch.testing.assert_close(g, hard_assign(d[None], kernels)[0])


@pytest.mark.parametrize("kernels", [1, 2, 3, 4])
def test_hard_borders_belong_to_the_upper_cell(kernels: int) -> None:
    borders = torch.arange(kernels + 1, dtype=torch.float32) - kernels / 2
    assert hard_assign(borders[None], kernels)[0].sum(0).tolist() == [1] * kernels + [0]
    below = torch.nextafter(borders, torch.tensor(-torch.inf))
    assert hard_assign(below[None], kernels)[0].sum(0).tolist() == [0] + [1] * kernels


@given(st.floats(0, 5), st.floats(0, 20))
def test_depth_aware_is_even_and_fades(difference: float, alpha: float) -> None:
    d = torch.tensor([[difference, -difference]], dtype=torch.float64)
    g = depth_aware_assign(d, alpha)[0, 0]
    assert g[0] == g[1] == torch.exp(-alpha * d[0, 0])


@pytest.mark.parametrize("value", [0.0, 1e6, -1e6, 1e30, -1e30, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e6])
def test_extremes_give_no_nan(value: float, temperature: float) -> None:
    d = torch.tensor([[value]], requires_grad=True)
    centers = DEFAULT.float().requires_grad_()
    t = torch.tensor(temperature, requires_grad=True)
    g = malleable_assign(d, centers, t)
    gradients: tuple[Tensor, ...] = torch.autograd.grad(g.sum(), [d, centers, t])
    assert all(torch.isfinite(v).all() for v in (g, *gradients))
