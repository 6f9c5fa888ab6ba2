"""Convolutions that standardise their weights: timm's and transformers' own layers are the oracle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

import malleable as mb
from helpers.networks import relative_error, scene
from malleable.models.convert import Converted
from malleable.models.own_forward import plain_inside


def of_transformers(**options: Any) -> nn.Conv2d:
    layers = pytest.importorskip("transformers.models.bit.modeling_bit")
    conv: nn.Conv2d = layers.WeightStandardizedConv2d(6, 8, 3, **options)
    return conv


MAKERS: dict[str, Callable[[], nn.Conv2d]] = {
    "scaled": lambda: ScaledStdConv2d(6, 8, 3, groups=2, gamma=1.7, gain_init=0.8),
    "scaled same": lambda: ScaledStdConv2dSame(6, 8, 3, stride=2, gamma=1.7, eps=1e-3),
    "standard": lambda: StdConv2d(6, 8, 3, stride=2, bias=True, eps=1e-2),
    "standard same": lambda: StdConv2dSame(6, 8, 5, stride=2),
    "transformers": lambda: of_transformers(padding=1),
    "transformers same": lambda: of_transformers(stride=2, eps=1e-3),
}
RGB = torch.randn(2, 6, 33, 32, generator=torch.Generator().manual_seed(0))
DEPTH = scene(2, 33, 32)[1]
FLAT = torch.full_like(DEPTH, 2.5)


@pytest.fixture(params=MAKERS)
def original(request: pytest.FixtureRequest) -> nn.Conv2d:
    return drawn(MAKERS[request.param](), seed=0)


def drawn(conv: nn.Conv2d, seed: int) -> nn.Conv2d:
    generator = torch.Generator().manual_seed(seed)
    for parameter in conv.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + 0.5)
    return conv


def converted(conv: nn.Conv2d, kind: str = "malleable") -> Converted:
    return mb.convert(nn.Sequential(conv), kind, where=["0"])


def run(net: nn.Module, depth: Tensor = DEPTH) -> Tensor:
    output: Tensor = net(RGB, depth=depth, focal=60.0)
    return output


@pytest.mark.parametrize("kind", ["malleable", "conv25d", "depth_aware"])
@pytest.mark.parametrize("depth", [FLAT, 0 * FLAT], ids=["flat", "missing"])
def test_output_and_gradients_are_the_original_s(original: nn.Conv2d, kind: str, depth: Tensor) -> None:
    net = converted(original, kind)
    layer = net.layers()["0"]
    expected, actual = original(RGB), run(net, depth)
    assert relative_error(actual, expected) < 1e-5
    towards = torch.randn(expected.shape)
    (expected * towards).sum().backward()
    (actual * towards).sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    for name, ours in (("weight", "weight"), ("gain", "standardise.gain")):
        if name in dict(original.named_parameters()):
            kernels = gradients[ours].unflatten(0, (layer.kernels, -1))  # each has its share
            assert relative_error(kernels.sum(0), original.get_parameter(name).grad) < 1e-4


def test_every_kernel_is_standardised_on_its_own(original: nn.Conv2d) -> None:
    net = converted(original)
    layer = net.layers()["0"]
    others = [drawn(copy.deepcopy(original), seed) for seed in (1, 2, 3)]
    state = {"weight": torch.cat([other.weight for other in others])}
    if hasattr(original, "gain"):
        state["standardise.gain"] = torch.cat([other.gain for other in others])
    layer.load_state_dict({**layer.state_dict(), **state})
    for other in others:
        other.bias = None
    expected = sum(share * other(RGB) for share, other in zip(layer.at_equal_depth(), others, strict=True))
    bias = 0 if layer.bias is None else layer.bias.view(-1, 1, 1)
    assert relative_error(run(net, FLAT), expected + bias) < 1e-5


def test_depth_changes_the_output(original: nn.Conv2d) -> None:
    assert relative_error(run(converted(original)), original(RGB)) > 1e-3


def test_a_state_dict_of_the_original_loads_and_comes_back(original: nn.Conv2d) -> None:
    net, source = converted(original), nn.Sequential(drawn(copy.deepcopy(original), seed=1))
    before = net.layers()["0"].gain.clone()
    net.load_original(source.state_dict())
    assert relative_error(run(net, FLAT), source(RGB)) < 1e-5
    assert torch.equal(net.layers()["0"].gain, before)  # of the receptive field, not of the filters
    state = net.original_state()
    assert state.keys() == source.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in source.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        net.load_original({key: value for key, value in source.state_dict().items() if key != "0.weight"})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_and_state_dicts(original: nn.Conv2d, copied: Callable[[Converted], Converted]) -> None:
    net, other = converted(original), converted(drawn(copy.deepcopy(original), seed=1))
    other.load_state_dict(net.state_dict())
    assert torch.equal(run(copied(net)), run(net))
    assert torch.equal(run(other), run(net))


def test_the_summary_counts_what_is_added(original: nn.Conv2d) -> None:
    net = converted(original)
    before, after = (sum(parameter.numel() for parameter in n.parameters()) for n in (original, net))
    assert mb.summary(net).layers[0].added == after - before


class TestRuntimes:
    @staticmethod
    def network() -> Converted:
        torch.manual_seed(0)
        return mb.convert(nn.Sequential(ScaledStdConv2d(3, 6, 3), nn.ReLU(), StdConv2dSame(6, 8, 3, 2)), where="all")

    def test_compile_with_gradients(self) -> None:
        rgb, depth = scene()
        net, plain = self.network(), self.network()
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        for n in (compiled, plain):
            n(rgb, depth=depth, focal=60.0).square().sum().backward()
        for a, b in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)

    def test_autocast(self) -> None:
        rgb, depth = scene()
        net = self.network()
        with torch.no_grad():
            expected = net(rgb, depth=depth, focal=60.0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                actual = net(rgb, depth=depth, focal=60.0)
        assert relative_error(actual.float(), expected) < 0.05

    def test_onnx(self, tmp_path: Path) -> None:
        onnxruntime = pytest.importorskip("onnxruntime")
        rgb, depth = scene()
        focal = torch.tensor([60.0, 70.0])
        net = self.network().eval()
        program = torch.onnx.export(
            net, (rgb,), kwargs={"depth": depth, "focal": focal}, dynamo=True, verbose=False, optimize=False
        )
        program.save(tmp_path / "net.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
        rgb, depth = scene(seed=1)
        given = {entry.name: t.numpy() for entry, t in zip(session.get_inputs(), (rgb, depth, focal), strict=True)}
        (actual,) = session.run(None, given)
        with torch.no_grad():
            assert relative_error(torch.from_numpy(actual), net(rgb, depth=depth, focal=focal)) < 1e-4


class PaddedBefore(nn.Sequential):
    """Pads as transformers' MobileNets do: outside of the convolution, more at the end, by the size of the map."""

    def forward(self, x: Tensor) -> Tensor:
        for conv in self:
            height, width = (max(0, (n + 1) // 2 * 2 + 1 - n) for n in x.shape[-2:])
            x = conv(nn.functional.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2)))
        return x


@pytest.mark.parametrize("kind", [Conv2dSame, pytest.param(nn.Conv2d, marks=pytest.mark.slow)])
def test_onnx_at_odd_sizes(kind: type[nn.Conv2d], tmp_path: Path) -> None:
    """ONNX divides whole numbers towards 0, so a ceiling that is written as −(−n // s) is a floor there."""
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    own = (nn.Sequential if kind is Conv2dSame else PaddedBefore)(kind(3, 4, 3, 2))
    net = mb.convert(own, where="all").eval()
    # The exporter takes minutes where both sizes vary, or more convolutions are padded from outside.
    focal, size = torch.tensor([60.0]), {2: torch.export.Dim("rows", min=16, max=4096)}
    program = torch.onnx.export(
        net,
        (torch.rand(1, 3, 32, 48),),
        kwargs={"depth": 1 + torch.rand(1, 1, 32, 48), "focal": focal},
        dynamic_shapes={"args": (size,), "depth": size, "focal": None},
        dynamo=True,
        verbose=False,
        optimize=False,  # rules of onnxscript 0.7 take time by the square of the nodes
    )
    program.save(tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    for height, width in ((33, 48), (34, 48), (35, 48)):
        rgb, depth = torch.rand(1, 3, height, width), 1 + torch.rand(1, 1, height, width)
        given = {entry.name: t.numpy() for entry, t in zip(session.get_inputs(), (rgb, depth, focal), strict=True)}
        (actual,) = session.run(None, given)
        with torch.no_grad():
            torch.testing.assert_close(
                torch.from_numpy(actual), net(rgb, depth=depth, focal=focal), rtol=1e-4, atol=1e-5
            )


def test_weights_that_are_not_there_yet() -> None:
    with torch.device("meta"):
        model = nn.Sequential(ScaledStdConv2d(3, 6, 3), nn.ReLU(), StdConv2d(6, 6, 3))
    assert mb.convert(model, where="all").original_state().keys() == model.state_dict().keys()


class Computed(nn.Conv2d):
    """Convolves with weights that it computes; it has the attributes of a convolution that standardises them."""

    eps = 1e-6

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.computed(input), self.bias, self.stride, self.padding, self.dilation, self.groups)

    def computed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def standard(self) -> Tensor:
        flat = self.weight.flatten(1)
        variance, mean = torch.var_mean(flat, 1, correction=0, keepdim=True)
        return ((flat - mean) * (variance + self.eps).rsqrt()).view_as(self.weight)


class Standard(Computed):
    def computed(self, x: Tensor) -> Tensor:
        return self.standard()


class OtherDeviation(Computed):
    def computed(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)
        return ((flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + self.eps)).view_as(self.weight)


class OtherEps(Computed):
    def computed(self, x: Tensor) -> Tensor:
        self.eps = 1e-5
        weight = self.standard()
        self.eps = 1e-6
        return weight


class OnlyInTraining(Computed):
    def computed(self, x: Tensor) -> Tensor:
        return self.standard() if self.training else self.weight


class OfTheInput(Computed):
    def computed(self, x: Tensor) -> Tensor:
        return self.standard() * (1 + x.mean())


class LowRank(Computed):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.update = nn.Parameter(torch.zeros(self.out_channels, 1, 1, 1))

    def computed(self, x: Tensor) -> Tensor:
        return self.standard() + self.update


class Doubled(Computed):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input)

    def computed(self, x: Tensor) -> Tensor:
        return self.standard()


class WithoutFloat64(TorchFunctionMode):
    """Has the meta device refuse float64, as Apple's GPUs do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert not (isinstance(result, Tensor) and result.is_meta and result.dtype == torch.float64)
        return result


def test_the_rule_is_found_whatever_the_default_device(original: nn.Conv2d) -> None:
    with torch.device("meta"), WithoutFloat64():
        inside = plain_inside(original)
    assert inside is not None


def test_the_rule_counts_not_the_name() -> None:
    conv = drawn(Standard(6, 8, 3), seed=0)
    assert relative_error(run(converted(conv), FLAT), conv(RGB)) < 1e-5


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [OtherDeviation, OtherEps, OnlyInTraining, OfTheInput, LowRank, Doubled])
def test_other_ways_to_compute_weights_are_refused(kind: type[nn.Conv2d], training: bool) -> None:
    with pytest.raises(TypeError, match=rf"cannot convert 0: .*{kind.__name__}"):
        converted(kind(6, 8, 3).train(training))


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize("make", [nn.Conv2d, ScaledStdConv2d])
def test_parametrized_weights_are_refused(wrap: Callable[[nn.Module], nn.Module], make: type[nn.Conv2d]) -> None:
    with pytest.raises(TypeError, match="un-parametrize it first"):
        converted(wrap(make(6, 8, 3)))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [timm.layers.Conv2dSame, StdConv2d])
def test_hooks_are_not_lost_in_silence(make: type[nn.Conv2d]) -> None:
    conv = make(6, 8, 3)
    conv.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="cannot convert 0: conv2d has hooks"):
        converted(conv)


def test_maps_smaller_than_the_kernel_are_padded_too() -> None:
    conv = drawn(Conv2dSame(6, 8, 5, stride=2), seed=0)
    expected = conv(RGB[..., :4, :4])
    found = converted(conv)(RGB[..., :4, :4], depth=FLAT[..., :4, :4], focal=60.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("width", [31, 32])
def test_what_is_padded_twice_is_read_whole(width: int) -> None:
    original = nn.Sequential(nn.ZeroPad2d(1), drawn(Conv2dSame(3, 8, 3, stride=2), seed=0))
    rgb, flat = RGB[:, :3, :, :width], FLAT[..., :width]
    expected = original(rgb)
    torch.testing.assert_close(mb.convert(original, where=["1"])(rgb, depth=flat, focal=60.0), expected)
