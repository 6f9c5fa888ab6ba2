"""The one-pass assignment against the equations in float64: output and every gradient."""

from __future__ import annotations

import pytest
import torch

from malleable.assign import malleable_assign
from malleable.ops import build
from malleable.ops.scaled_assign import _operator, scaled_assign


@pytest.mark.parametrize("kernels", [1, 2, 3, 5, 30, 40])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 7.0])
def test_against_the_equations(kernels: int, temperature: float) -> None:
    d = 3 * torch.randn(2, 9, 11, 17)
    d.view(-1)[:8] = torch.tensor([0.0, 1e3, -1e3, 1e6, -1e6, 1e20, -1e20, 0.5])
    centers = torch.linspace(-3, 3, kernels + 2) + 0.1 * torch.randn(kernels + 2)
    leaves = [d, centers, torch.tensor(temperature), torch.rand(kernels)]
    leaves = [t.requires_grad_() for t in leaves]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y = scaled_assign(*leaves)
    expected = malleable_assign(*exact[:3]) * exact[3].view(1, -1, 1, 1, 1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    direction = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, direction)
    expected_gradients = torch.autograd.grad(expected, exact, direction.double())
    for name, a, e in zip(("d", "centers", "temperature", "scale"), gradients, expected_gradients, strict=True):
        # The temperature's gradient is a sum of both signs, of which little is left.
        tolerance = 2e-4 if name == "temperature" else 2e-5
        assert (a.double() - e).abs().max() <= tolerance * e.abs().max(), name


def test_far_pixels_weigh_exactly_nothing() -> None:
    """So that engines may leave them out."""
    y = scaled_assign(torch.full((1, 1, 4, 4), 50.0), torch.arange(-2.0, 3.0), torch.tensor(1.0), torch.ones(3))
    assert (y == 0).all()


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    if isinstance(build.library(), str):
        pytest.skip(str(build.library()))
    d = torch.randn(2, 9, 40, 50)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        centers = torch.arange(-2.0, 3.0).requires_grad_()
        scaled_assign(d, centers, torch.tensor(1.0), torch.ones(3)).square().sum().backward()
        results.append(centers.grad)
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], r) for r in results[1:])  # type: ignore[arg-type]


def test_another_engine_means_no_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLEABLE_ENGINE", "plain")
    monkeypatch.setattr("malleable.ops.scaled_assign.library", lambda: pytest.fail("built all the same"))
    scaled_assign(torch.zeros(1, 1, 2, 2), torch.arange(-2.0, 3.0), torch.tensor(1.0), torch.ones(3))


def test_opcheck() -> None:
    d = torch.randn(2, 9, 5, 6, requires_grad=True)
    rest = (torch.arange(-2.0, 3.0), torch.tensor(1.0), torch.ones(3))
    torch.library.opcheck(_operator, (d, *(t.requires_grad_() for t in rest)))


def test_empty_batch() -> None:
    d = torch.empty(0, 9, 5, 6)
    centers = torch.arange(-2.0, 3.0).requires_grad_()
    y = scaled_assign(d, centers, torch.tensor(1.0), torch.ones(3))
    y.sum().backward()
    assert y.shape == (0, 3, 9, 5, 6)
    assert (centers.grad == 0).all()  # type: ignore[union-attr]
