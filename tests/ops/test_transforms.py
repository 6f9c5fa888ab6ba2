"""torch.func, forward differentiation and double backward are right on every engine, never silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import malleable as mb
from malleable.functional import depth_conv2d
from malleable.ops.engines import plain
from malleable.ops.engines.native import build
from malleable.ops.window import Window

ENGINES = [("native", 1), ("native", 2), ("native", 4), ("blocks", 1), ("plain", 1), ("plain", 2)]
WINDOW = Window.of(3, 2, 1)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "malleable": lambda: mb.MalleableConv2d(4, 4, 3, 2, 1),
    "malleable, depthwise": lambda: mb.MalleableConv2d(4, 4, 3, 2, 1, groups=4, kernels=2),
    "2.5D": lambda: mb.Conv25d(4, 4, 3, 2, 1),
    "depth-aware": lambda: mb.DepthAwareConv2d(4, 4, 3, 2, 1),
    "pool": lambda: mb.DepthAwareAvgPool2d(3, 2, 1),
}


@pytest.fixture(autouse=True)
def _wish(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = request.node.callspec.params["engine"]
    if engine == "native" and isinstance(build.library(), str):
        pytest.skip(str(build.library()))
    monkeypatch.setenv("MALLEABLE_ENGINE", engine)


def tensors(groups: int) -> tuple[Tensor, ...]:
    """x, weight, assign and bias in float32."""
    return torch.randn(2, 4, 5, 6), torch.randn(12, 4 // groups, 3, 3), torch.rand(2, 3, 9, 3, 3), torch.randn(4)


def convolve(groups: int) -> Callable[..., Tensor]:
    return lambda x, weight, assign, bias: depth_conv2d(x, weight, assign, bias, 2, 1, 1, groups)


def assert_close(actual: Any, expected: Any) -> None:
    """Compare as parts of the largest value, as sums of any size come here."""
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert (a.double() - e.double()).abs().max() <= 1e-4 * e.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize(("engine", "groups"), ENGINES)
class TestOperator:
    def test_func_grad(self, engine: str, groups: int) -> None:
        given = tensors(groups)
        direction = torch.randn(2, 4, 3, 3)
        found = grad(lambda *t: (convolve(groups)(*t) * direction).sum(), argnums=(0, 1, 2, 3))(*given)
        exact = [t.double() for t in (direction, *given[:3])]
        expected = plain.backward(exact[0], exact[1], exact[2], exact[3], WINDOW, groups, (True, True, True))
        assert_close(found, [*expected, direction.sum((0, 2, 3))])

    def test_vmap(self, engine: str, groups: int) -> None:
        _, weight, assign, bias = tensors(groups)
        xs, weights = torch.randn(3, 2, 4, 5, 6), torch.stack([weight, 2 * weight, weight - 1])
        found = vmap(convolve(groups), (0, 0, None, None))(xs, weights, assign, bias)
        assert_close(found, [convolve(groups)(x, w, assign, bias) for x, w in zip(xs, weights, strict=True)])

    def test_gradients_of_each_sample(self, engine: str, groups: int) -> None:
        x, weight, assign, bias = tensors(groups)

        def loss(weight: Tensor, x: Tensor, assign: Tensor) -> Tensor:
            return convolve(groups)(x[None], weight, assign[None], bias).square().sum()

        leaf = weight.clone().requires_grad_()
        expected = [torch.autograd.grad(loss(leaf, a, b), leaf)[0] for a, b in zip(x, assign, strict=True)]
        assert_close(vmap(grad(loss), (None, 0, 0))(weight, x, assign), expected)

    @pytest.mark.parametrize("place", range(3))
    def test_jvp_of_what_it_is_linear_in(self, place: int, engine: str, groups: int) -> None:
        given = list(tensors(groups))
        run, tangent = convolve(groups), torch.randn_like(given[place])

        def of_one(t: Tensor) -> Tensor:
            return run(*given[:place], t, *given[place + 1 :])

        _, found = jvp(of_one, (given[place],), (tangent,))
        assert_close([found], [of_one(tangent) - given[3].view(-1, 1, 1)])
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(given[place], tangent)
            assert_close([torch.autograd.forward_ad.unpack_dual(of_one(dual)).tangent], [found])

    def test_double_backward(self, engine: str, groups: int) -> None:
        """⟨v, d/dt ∇f(p + t·u)⟩ at 0 by central differences of gradients in float64, exact for a cubic polynomial."""
        given = tensors(groups)
        u, v = ([torch.randn_like(t) for t in given[:3]] for _ in range(2))
        direction = torch.randn(2, 4, 3, 3)
        leaves = [t.clone().requires_grad_() for t in given[:3]]
        first = torch.autograd.grad(convolve(groups)(*leaves, given[3]), leaves, direction, create_graph=True)
        second = torch.autograd.grad(first, leaves, v)
        found = sum((s.double() * t.double()).sum() for s, t in zip(second, u, strict=True))

        def slope(step: float) -> Tensor:
            x, weight, assign = (t.double() + step * s.double() for t, s in zip(given[:3], u, strict=True))
            gradients = plain.backward(direction.double(), x, weight, assign, WINDOW, groups, (True, True, True))
            products = [(g * t.double()).sum() for g, t in zip(gradients, v, strict=True) if g is not None]
            return torch.stack(products).sum()

        expected = (slope(1) - slope(-1)) / 2
        assert abs(found - expected) <= 1e-4 * abs(expected).clamp(min=1)

    def test_many_gradients_at_once(self, engine: str, groups: int) -> None:
        given = tensors(groups)

        def few(weight: Tensor) -> Tensor:
            return convolve(groups)(given[0], weight, *given[2:])[0, :, 1, 1]

        expected = torch.autograd.functional.jacobian(few, given[1])
        assert_close([torch.autograd.functional.jacobian(few, given[1], vectorize=True)], [expected])
        assert_close([jacrev(few)(given[1])], [expected])


@pytest.mark.parametrize("engine", ["native"])
def test_jvp_and_a_compiler(engine: str) -> None:
    torch._dynamo.reset()
    given = tensors(groups=1)
    tangents = tuple(map(torch.ones_like, given))
    _, expected = jvp(convolve(1), given, tangents)
    compiled = torch.compile(convolve(1), backend="aot_eager")
    compiled(*given)  # what was compiled without jvp must not be taken with it
    assert_close([jvp(compiled, given, tangents)[1]], [expected])
    inside = torch.compile(lambda *t: jvp(convolve(1), t, tangents)[1], backend="aot_eager")
    assert_close([inside(*given)], [expected])


@pytest.mark.parametrize("engine", ["native", "plain"])
def test_gradients_of_each_sample_with_a_camera_of_its_own(engine: str) -> None:
    layer = LAYERS["malleable"]()
    x, depth, focal = torch.randn(3, 4, 5, 6), 2 + torch.rand(3, 1, 10, 12), torch.tensor([30.0, 40.0, 50.0])

    def loss(parameters: dict[str, Tensor], x: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        y: Tensor = functional_call(layer, parameters, (x[None], mb.Geometry(depth[None], focal)))
        return y.square().sum()

    parameters = dict(layer.named_parameters())
    found = vmap(grad(loss), (None, 0, 0, 0))(parameters, x, depth, focal)
    for place, sample in enumerate(zip(x, depth, focal, strict=True)):
        expected = torch.autograd.grad(loss(parameters, *sample), list(parameters.values()))
        assert_close([found[name][place] for name in parameters], list(expected))


@pytest.mark.parametrize("engine", ["native", "plain"])
def test_a_geometry_serves_calls_after_a_transform(engine: str) -> None:
    layer, x, depth = LAYERS["malleable"](), torch.randn(2, 4, 5, 6), 2 + torch.rand(2, 1, 10, 12)
    geometry = mb.Geometry(depth, 30.0)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        y: Tensor = functional_call(layer, parameters, (x, geometry))
        return y.square().sum()

    grad(loss)(dict(layer.named_parameters()))
    layer.requires_grad_(False)
    assert torch.equal(layer(x, geometry), layer(x, mb.Geometry(depth, 30.0)))


@pytest.mark.parametrize("engine", ["native", "blocks", "plain"])
@pytest.mark.parametrize("name", LAYERS)
class TestLayers:
    @pytest.fixture
    def case(self, name: str, engine: str) -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
        """A layer as a function of its input and parameters; these in float32, and in float64."""
        if engine == "blocks" and name in ("malleable, depthwise", "pool"):
            pytest.skip("blocks takes no groups")
        layer = LAYERS[name]()
        depth = 2 + 0.3 * torch.rand(2, 1, 10, 12)
        depth[:, :, 3:6, 2:5] = 0
        names = [name for name, _ in layer.named_parameters()]

        def run(x: Tensor, *parameters: Tensor) -> Tensor:
            geometry = mb.Geometry(depth, 30.0)
            return functional_call(layer, dict(zip(names, parameters, strict=True)), (x, geometry))

        given = [torch.randn(2, 4, 5, 6), *(p.detach() for p in layer.parameters())]
        return run, given, [t.double() for t in given]

    def test_func_grad_and_vmap(self, name: str, engine: str, case: Any) -> None:
        run, given, _ = case
        leaves = [t.clone().requires_grad_() for t in given]
        expected = torch.autograd.grad(run(*leaves).square().sum(), leaves)
        places = tuple(range(len(given)))
        assert_close(grad(lambda *t: run(*t).square().sum(), argnums=places)(*given), expected)
        many = [torch.stack([t, 1.1 * t]) for t in given]
        assert_close(vmap(run)(*many), [run(*(t[i] for t in many)) for i in range(2)])

    def test_jvp(self, name: str, engine: str, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        run, given, exact = case
        along = [torch.randn_like(t) for t in given]
        _, found = jvp(run, tuple(given), tuple(along))
        monkeypatch.setenv("MALLEABLE_ENGINE", "plain")
        ahead, behind = (run(*(t + h * s for t, s in zip(exact, along, strict=True))) for h in (1e-5, -1e-5))
        assert_close([found], [(ahead - behind) / 2e-5])

    def test_double_backward(self, name: str, engine: str, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        run, given, exact = case
        leaves = [t.clone().requires_grad_() for t in given]
        first = torch.autograd.grad(run(*leaves).square().sum(), leaves, create_graph=True)
        along = [torch.randn_like(t) for t in given]
        found = torch.autograd.grad(first, leaves, along)  # Hessian times along
        monkeypatch.setenv("MALLEABLE_ENGINE", "plain")

        def gradients(step: float) -> tuple[Tensor, ...]:
            moved = [(t + step * s.double()).requires_grad_() for t, s in zip(exact, along, strict=True)]
            return torch.autograd.grad(run(*moved).square().sum(), moved)

        ahead, behind = gradients(1e-5), gradients(-1e-5)
        assert_close(found, [(a - b) / 2e-5 for a, b in zip(ahead, behind, strict=True)])
