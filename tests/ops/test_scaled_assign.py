"""The one-pass assignment against the equations in float64: output and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from malleable.assign import malleable_assign
from malleable.ops.engines.native import build
from malleable.ops.scaled_assign import _assign_in_graph, _operator, scaled_assign


def check_against_the_equations(kernels: int, temperature: float) -> None:
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


@pytest.mark.parametrize("kernels", [1, 2, 3, 5, 30, 40])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 7.0])
def test_against_the_equations(kernels: int, temperature: float) -> None:
    check_against_the_equations(kernels, temperature)


@pytest.mark.parametrize("engine", ["plain", "blocks"])
def test_trains_with_another_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLEABLE_ENGINE", engine)
    check_against_the_equations(3, 1.0)


def test_trains_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("malleable.ops.scaled_assign.library", lambda: "no C++ compiler was found")
    check_against_the_equations(3, 1.0)


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
    if isinstance(build.library(), str):
        pytest.skip(str(build.library()))
    d = torch.randn(2, 9, 5, 6, requires_grad=True)
    rest = (torch.arange(-2.0, 3.0), torch.tensor(1.0), torch.ones(3))
    torch.library.opcheck(_operator, (d, *(t.requires_grad_() for t in rest)))


def raw_call(backward: bool = False) -> dict[str, Tensor]:
    call = {"d": torch.randn(2, 9, 5, 6), "centers": torch.arange(-2.0, 3.0)}
    call |= {"temperature": torch.tensor(1.0), "scale": torch.ones(3)}
    return call | ({"grad": torch.ones(2, 3, 9, 5, 6)} if backward else {})


WRONG: list[tuple[dict[str, Tensor], type[Exception], str]] = [
    ({"d": torch.zeros(2, 9, 5, 6).double()}, TypeError, "d must be float32, got torch.float64"),
    ({"d": torch.zeros(2, 9, 5, 6, device="meta")}, ValueError, "d must be on the CPU, got meta"),
    ({"d": torch.zeros(9)}, ValueError, r"d must have shape \(N, taps, Hout, Wout\), got \(9,\)"),
    ({"centers": torch.arange(3.0)}, ValueError, r"centers must have shape \(K \+ 2,\) = \(5,\), got \(3,\)"),
    ({"centers": torch.arange(5)}, TypeError, "centers must be float32, got torch.int64"),
    ({"temperature": torch.ones(2)}, ValueError, r"temperature must have shape .* = \(\), got \(2,\)"),
    ({"temperature": torch.ones(()).half()}, TypeError, "temperature must be float32, got torch.float16"),
    ({"scale": torch.ones(0)}, ValueError, r"scale must have shape \(K,\), K from 1 to 30, got \(0,\)"),
    ({"scale": torch.ones(31), "centers": torch.ones(33)}, ValueError, r"K from 1 to 30, got \(31,\)"),
    ({"scale": torch.ones(3).bfloat16()}, TypeError, "scale must be float32, got torch.bfloat16"),
]
WRONG_BACKWARD: list[tuple[dict[str, Tensor], type[Exception], str]] = [
    ({"grad": torch.ones(2, 3, 9, 1, 1)}, ValueError, r"grad must have shape .* = \(2, 3, 9, 5, 6\), got"),
    ({"grad": torch.ones(2, 3, 9, 5, 6).double()}, TypeError, "grad must be float32, got torch.float64"),
    ({"grad": torch.ones(2, 3, 9, 5, 6, device="meta")}, ValueError, "grad must be on the CPU, got meta"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_the_raw_operator_checks_its_arguments(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        torch.ops.malleable.scaled_assign(**raw_call() | change)


@pytest.mark.parametrize(("change", "error", "message"), WRONG + WRONG_BACKWARD)
def test_the_raw_backward_checks_its_arguments(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        torch.ops.malleable.scaled_assign_backward(**raw_call(backward=True) | change)


def test_the_raw_operator_says_that_it_needs_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("malleable.ops.scaled_assign.library", lambda: "no C++ compiler was found")
    with pytest.raises(RuntimeError, match=r"C\+\+ only: no C\+\+ compiler was found"):
        torch.ops.malleable.scaled_assign(**raw_call())


def test_counting_shapes_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("malleable.ops.scaled_assign.library", lambda: pytest.fail("built for shapes alone"))
    with FakeTensorMode():
        fakes = {name: torch.empty(t.shape) for name, t in raw_call().items()}
        assert scaled_assign(**fakes).shape == (2, 3, 9, 5, 6)


@pytest.mark.parametrize("usable", [True, False])
def test_a_compiled_graph_holds_the_operator_only_if_it_can_run(usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("malleable.ops.scaled_assign.library", lambda: None if usable else "no C++ compiler was found")
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(str(graph.graph))
        return lambda *args: (torch.zeros(()),)

    compiled = torch.compile(scaled_assign, backend=backend, fullgraph=True, dynamic=True)
    for size in (11, 12, 13):
        compiled(**raw_call() | {"d": torch.randn(2, 9, size, size + 3)})
    assert len(graphs) == 1  # no size is compiled anew
    assert ("malleable.scaled_assign" in graphs[0]) == usable


def test_empty_batch() -> None:
    d = torch.empty(0, 9, 5, 6)
    centers = torch.arange(-2.0, 3.0).requires_grad_()
    y = scaled_assign(d, centers, torch.tensor(1.0), torch.ones(3))
    y.sum().backward()
    assert y.shape == (0, 3, 9, 5, 6)
    assert (centers.grad == 0).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("kernels", [1, 3])
def test_in_graphs_for_other_runtimes_nothing_is_subnormal(kernels: int) -> None:
    d = torch.cat([torch.linspace(-12, 12, 997), torch.tensor([-1e7, 1e7])]).view(1, -1, 1, 1)
    centers, temperature = torch.linspace(-2.2, 1.9, kernels + 2), torch.tensor(0.8)
    scale = torch.linspace(0.5, 1, kernels)
    actual = _assign_in_graph(d, centers, temperature, scale)
    torch.testing.assert_close(actual, malleable_assign(d, centers, temperature) * scale.view(1, -1, 1, 1, 1))
    assert actual.min() > 1e-30
