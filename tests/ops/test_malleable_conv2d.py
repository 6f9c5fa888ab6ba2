"""A layer in one call: as the two steps it stands for, whatever changes between calls that look alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import malleable as mb
from malleable.ops.engines.native import build

pytestmark = pytest.mark.skipif(isinstance(build.library(), str), reason="there is no C++ library")

at_once = import_module("malleable.ops.malleable_conv2d")

DEPTH = 2 + 0.3 * torch.rand(2, 1, 18, 20, generator=torch.Generator().manual_seed(0))
DEPTH[:, :, 3:6, 2:9] = 0


def layer_of(groups: int = 1, bias: bool = True) -> mb.MalleableConv2d:
    layer = mb.MalleableConv2d(6, 6, 3, 2, 1, groups=groups, bias=bias)
    with torch.no_grad():
        layer.rebalance.copy_(torch.tensor([0.3, -1.0, 0.5]))
        layer.gain.fill_(1.7)
    return layer


def two_steps(layer: mb.MalleableConv2d, x: Tensor, depth: Tensor = DEPTH) -> Tensor:
    geometry = mb.Geometry(depth, 60.0)
    window = (layer.stride, layer.window.padding[::-2], layer.dilation)
    return mb.functional.depth_conv2d(
        x, layer.weight, layer.assign(geometry, x.shape[-2:]), layer.bias, *window, layer.groups
    )


def check(layer: mb.MalleableConv2d, x: Tensor, depth: Tensor = DEPTH) -> Tensor:
    with torch.no_grad():
        torch.testing.assert_close(layer(x, mb.Geometry(depth, 60.0)), two_steps(layer, x, depth))
    y: Tensor = layer(x, mb.Geometry(depth, 60.0))
    torch.testing.assert_close(y, two_steps(layer, x, depth))
    return y


def name_of(y: Tensor) -> str:
    assert y.grad_fn is not None
    return str(y.grad_fn.name())


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_output_layout_and_gradients(groups: int, bias: bool, layout: torch.memory_format) -> None:
    layer = layer_of(groups, bias)
    leaves = [torch.randn(2, 6, 9, 10).to(memory_format=layout).requires_grad_(), *layer.parameters()]
    depth = DEPTH.clone().requires_grad_()
    for geometry, wanted in ((DEPTH, leaves), (depth, [*leaves, depth])):
        y, expected = layer(leaves[0], mb.Geometry(geometry, 60.0)), two_steps(layer, leaves[0], geometry)
        assert name_of(y) == "_RecordedAtOnceBackward"
        assert y.stride() == nn.functional.conv2d(leaves[0], torch.zeros(6, 6, 3, 3), stride=2, padding=1).stride()
        torch.testing.assert_close(y, expected)
        direction = torch.randn_like(y)
        found, right = (torch.autograd.grad(t, wanted, direction) for t in (y, expected))
        for a, e in zip(found, right, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("raw", [1.3, 0.2, -3.0])
def test_gradients_and_theirs_against_float64(raw: float) -> None:
    """What float64 computes are the equations, differentiated by autograd."""
    layer, x = layer_of(), torch.randn(2, 6, 9, 10)
    layer.raw_temperature.data.fill_(raw)
    exact = copy.deepcopy(layer).double()
    y, expected = layer(x, mb.Geometry(DEPTH, 60.0)), exact(x.double(), mb.Geometry(DEPTH.double(), 60.0))
    assert name_of(y) == "_RecordedAtOnceBackward"
    direction = torch.randn_like(y)
    sides = ((y, direction, layer), (expected, direction.double(), exact))
    for again in (False, True):
        found, right = (
            torch.autograd.grad(t, [*net.parameters()], along, retain_graph=True, create_graph=again)
            for t, along, net in sides
        )
        for (name, _), a, e in zip(layer.named_parameters(), found, right, strict=True):
            assert (a.double() - e).abs().max() <= 2e-4 * e.abs().max(), (name, again)
    wanted = ("centers", "raw_temperature", "rebalance", "weight")
    second, right = (
        torch.autograd.grad(sum(g.square().sum() for g in firsts), [getattr(net, name) for name in wanted])
        for firsts, net in ((found, layer), (right, exact))
    )
    for name, a, e in zip(wanted, second, right, strict=True):
        assert (a.double() - e).abs().max() <= 2e-3 * e.abs().max(), name


def test_the_bias_alone_can_be_trained_with_gradients_of_gradients() -> None:
    layer = layer_of().requires_grad_(False)
    assert layer.bias is not None
    layer.bias.requires_grad_()
    y = layer(torch.randn(2, 6, 9, 10), mb.Geometry(DEPTH, 60.0))
    (first,) = torch.autograd.grad(y.square().sum(), [layer.bias], create_graph=True)
    torch.testing.assert_close(first, 2 * y.sum((0, 2, 3)))
    (second,) = torch.autograd.grad(first.sum(), [layer.bias])
    assert (second == 2 * y[:, 0].numel()).all()


def test_a_frozen_layer_gives_the_gradient_of_its_input_alone() -> None:
    layer = layer_of().requires_grad_(False)
    x = torch.randn(2, 6, 9, 10, requires_grad=True)
    y = layer(x, mb.Geometry(DEPTH, 60.0))
    torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), x)[0] for t in (y, two_steps(layer, x))))


def step(layer: mb.MalleableConv2d) -> None:
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.SGD(layer.parameters(), 0.1).step()


CHANGES: dict[str, Callable[[mb.MalleableConv2d], object]] = {
    "an update": step,
    "the data of a parameter": lambda layer: setattr(layer.weight, "data", torch.randn(18, 6, 3, 3)),
    "a parameter": lambda layer: setattr(layer, "centers", nn.Parameter(torch.linspace(-3, 3, 5))),
    "a parameter with strides": lambda layer: setattr(layer, "centers", nn.Parameter(torch.linspace(-3, 3, 10)[::2])),
    "the temperature": lambda layer: setattr(layer, "temperature", 0.3),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "the layout of the weights": lambda layer: layer.to(memory_format=torch.channels_last),
    "a parametrization of the weights": lambda layer: parametrize.register_parametrization(layer, "weight", nn.Tanh()),
    "a parametrization of the bias": lambda layer: parametrize.register_parametrization(layer, "bias", nn.Tanh()),
    "a parametrization of the centers": lambda layer: parametrize.register_parametrization(layer, "centers", nn.Tanh()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls_is_seen(change: str) -> None:
    layer, x = layer_of(), torch.randn(2, 6, 9, 10)
    before = check(layer, x)
    CHANGES[change](layer)
    after = check(layer, x)
    assert (change == "the layout of the weights") == torch.equal(before, after)


def test_shapes_batches_layouts_and_dtypes_take_turns() -> None:
    layer = layer_of()
    twin = copy.deepcopy(layer).double()
    for _ in range(2):
        check(layer, torch.randn(2, 6, 9, 10))
        check(layer, torch.randn(1, 6, 9, 10), DEPTH[:1])
        check(layer, torch.randn(2, 6, 10, 9).transpose(2, 3))
        check(layer, torch.randn(2, 6, 6, 5), torch.rand(2, 1, 12, 10) + 1)
        assert check(twin, torch.randn(2, 6, 9, 10, dtype=torch.float64)).dtype == torch.float64
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(2, 6, 9, 10), mb.Geometry(DEPTH, 60.0)).dtype == torch.bfloat16


def test_grad_mode_decides_each_call() -> None:
    layer, x, geometry = layer_of(), torch.randn(2, 6, 9, 10), mb.Geometry(DEPTH, 60.0)
    for _ in range(2):
        assert layer(x, geometry).requires_grad
        with torch.no_grad():
            assert not layer(x, geometry).requires_grad
        with torch.inference_mode():
            assert layer(x, geometry).is_inference()
        layer.requires_grad_(False)
        assert not layer(x, geometry).requires_grad
        assert layer(x.clone().requires_grad_(), geometry).requires_grad
        layer.requires_grad_(True)


def test_the_engine_wished_for_decides_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, geometry = layer_of(), torch.randn(2, 6, 9, 10), mb.Geometry(DEPTH, 60.0)
    for engine, at_once in (("auto", True), ("plain", False), ("native", True), ("blocks", False), ("auto", True)):
        monkeypatch.setenv("MALLEABLE_ENGINE", engine)
        y = layer(x, geometry)
        assert name_of(y) == ("_RecordedAtOnceBackward" if at_once else "_RecordedBackward")
    monkeypatch.setenv("MALLEABLE_ENGINE", "plain")
    expected = layer(x, geometry)
    torch.testing.assert_close(y, expected)


def test_another_engine_means_no_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("malleable_conv2d", "scaled_assign", "differences"):
        name = f"malleable.ops.{module}.library"
        monkeypatch.setattr(name, lambda: pytest.fail("built all the same"))
    monkeypatch.setenv("MALLEABLE_ENGINE", "plain")
    layer_of()(torch.randn(2, 6, 9, 10), mb.Geometry(DEPTH, 60.0))


def test_the_number_of_threads_may_change() -> None:
    large = DEPTH.repeat(1, 1, 3, 3)  # enough for several threads
    layer, x, geometry = layer_of(), torch.randn(2, 6, 27, 30), mb.Geometry(large, 60.0)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3, 2, 1):
        torch.set_num_threads(threads)
        found.append(layer(x, geometry))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], y) for y in found)


def test_defaults_of_the_process_do_not_matter() -> None:
    layer, x = layer_of(), torch.randn(2, 6, 9, 10)
    expected = layer(x, mb.Geometry(DEPTH, 60.0))
    torch.set_default_dtype(torch.float64)
    try:
        found = [layer(x, mb.Geometry(DEPTH, 60.0))]
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        found.append(layer(x, mb.Geometry(DEPTH, 60.0)))
    assert all(torch.equal(y, expected) for y in found)


def test_a_change_before_backward_is_refused() -> None:
    layer, x = layer_of(), torch.randn(2, 6, 9, 10)
    y = layer(x, mb.Geometry(DEPTH, 60.0))
    with torch.no_grad():
        layer.centers.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_subclass_with_an_assignment_of_its_own_keeps_it() -> None:
    class Doubled(mb.MalleableConv2d):
        def assign(self, *args: object, **options: object) -> Tensor:
            return 2 * super().assign(*args, **options)  # type: ignore[arg-type]

    layer, x = Doubled(6, 6, 3, 2, 1, bias=False), torch.randn(2, 6, 9, 10)
    usual = mb.MalleableConv2d(6, 6, 3, 2, 1, bias=False)
    usual.load_state_dict(layer.state_dict())
    geometry = mb.Geometry(DEPTH, 60.0)
    torch.testing.assert_close(layer(x, geometry), 2 * usual(x, geometry))


class Doubled(mb.MalleableConv2d):
    @property
    def scales(self) -> Tensor:
        return 2 * super().scales


class Hotter(mb.MalleableConv2d):
    @property
    def temperature(self) -> Tensor:
        return 2 * self.raw_temperature

    @temperature.setter
    def temperature(self, t: float) -> None:
        nn.init.constant_(self.raw_temperature, t)


@pytest.mark.parametrize("kind", [Doubled, Hotter])
def test_a_subclass_with_scales_or_a_temperature_of_its_own_keeps_them(kind: type[mb.MalleableConv2d]) -> None:
    layer, x, geometry = kind(6, 6, 3, padding=1), torch.randn(2, 6, 9, 10), mb.Geometry(DEPTH, 60.0)
    expected = mb.functional.depth_conv2d(x, layer.weight, layer.assign(geometry, (9, 10)), layer.bias, padding=1)
    torch.testing.assert_close(layer(x, geometry), expected)


@pytest.mark.parametrize("name", ["centers", "rebalance"])
def test_parameters_of_a_wrong_size_never_reach_the_kernels(name: str) -> None:
    layer = layer_of()
    setattr(layer, name, nn.Parameter(torch.zeros(4)))
    with pytest.raises((RuntimeError, ValueError)):
        layer(torch.randn(2, 6, 9, 10), mb.Geometry(DEPTH, 60.0))


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_once, "_MOST_CALLS", 3)
    monkeypatch.setattr(at_once, "_plans", {})
    layer = layer_of()
    for size in range(4, 12):
        layer(torch.randn(1, 6, size, size), mb.Geometry(torch.ones(1, 1, size, size), 60.0))
        assert len(at_once._plans) <= 3
