"""What the layers promise beside the equations: laws, clear errors and the manners of ``nn.Conv2d``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

import malleable as mb

CONVOLUTIONS: list[Any] = [mb.MalleableConv2d, mb.Conv25d, mb.DepthAwareConv2d]


def steps(batch: int = 2, height: int = 12, width: int = 14, dtype: torch.dtype = torch.float32) -> Tensor:
    """Depth whose relative differences reach a few grid cells at focal length 40."""
    return (2 + 0.1 * torch.randn(batch, 1, height, width, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("cls", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("missing", [0.0, 3.0, torch.nan])
def test_converted_layers_are_the_convolution_without_depth(cls: Any, bias: bool, missing: float) -> None:
    """With flat depth, or none, conversion changes nothing."""
    conv = nn.Conv2d(4, 6, 3, 2, 1, groups=2, bias=bias).eval()
    layer = cls.from_conv2d(conv)
    x = torch.randn(2, 4, 12, 14)
    geometry = mb.Geometry(torch.full((2, 1, 48, 56), missing), 100.0)
    torch.testing.assert_close(layer(x, geometry), conv(x), rtol=1e-5, atol=1e-6)
    assert not layer.training
    assert layer.weight.data_ptr() != conv.weight.data_ptr()
    assert torch.equal(layer.weight.view(layer.kernels, *conv.weight.shape)[-1], conv.weight)


@pytest.mark.parametrize("kernels", [1, 2, 3, 5])
def test_gain_undoes_what_the_receptive_field_takes(kernels: int) -> None:
    conv = nn.Conv2d(2, 3, 3, dtype=torch.float64)
    layer = mb.MalleableConv2d.from_conv2d(conv, kernels, temperature=0.3, centers=range(-1, kernels + 1))
    total = layer.scales @ layer.receptive_field(torch.zeros((), dtype=torch.float64))
    assert layer.gain.item() == pytest.approx(1 / total.item(), rel=1e-12)
    assert "gain" in layer.state_dict()
    assert not any(name == "gain" for name, _ in layer.named_parameters())


def test_no_valid_depth_is_an_ordinary_convolution() -> None:
    """Also before any conversion: the kernels add up to one."""
    layer = mb.MalleableConv2d(3, 4, 3, padding=1, dtype=torch.float64)
    s = layer.scales * layer.receptive_field(torch.zeros(()))
    weight = (layer.weight.view(3, 4, 3, 3, 3) * s.view(-1, 1, 1, 1, 1)).sum(0)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    expected = nn.functional.conv2d(x, weight, layer.bias, padding=1)
    torch.testing.assert_close(layer(x, mb.Geometry(torch.zeros(2, 1, 8, 8), 40.0)), expected)


@given(st.integers(1, 5), st.integers(1, 2), st.integers(1, 2), st.integers(0, 2**20))
@settings(max_examples=20)
def test_flipped_input_gives_flipped_output(kernels: int, dilation: int, groups: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer = mb.MalleableConv2d(2, 4, 3, 1, dilation, dilation, groups, kernels=kernels, dtype=torch.float64)
    mirrored = copy.deepcopy(layer)
    mirrored.weight.data = layer.weight.data.flip(-1)
    x, depth = torch.randn(2, 2, 7, 8, dtype=torch.float64), steps(2, 7, 8, torch.float64)
    y = layer(x, mb.Geometry(depth, 40.0))
    flipped = mirrored(x.flip(-1), mb.Geometry(depth.flip(-1), 40.0))
    torch.testing.assert_close(flipped.flip(-1), y)


@given(st.integers(1, 5), st.integers(0, 2**20))
@settings(max_examples=20)
def test_equal_kernels_are_one_kernel_under_a_mask(kernels: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer = mb.MalleableConv2d.from_conv2d(nn.Conv2d(2, 3, 3, bias=False, dtype=torch.float64), kernels)
    layer.gain.fill_(1.0)
    x, geometry = torch.randn(1, 2, 6, 7, dtype=torch.float64), mb.Geometry(steps(1, 6, 7, torch.float64), 40.0)
    d = geometry.relative_depth(layer.window, (6, 7), torch.float64).value
    mask = (layer.receptive_field(d).sum(0) / kernels).unsqueeze(1)  # (N, 1, taps, Hout, Wout)
    expected = mb.functional.depth_conv2d(x, layer.weight[:3], mask)
    torch.testing.assert_close(layer(x, geometry), expected)


@given(st.floats(0.05, 20))
@settings(max_examples=20)
def test_only_relative_depth_counts(factor: float) -> None:
    """The authors' code compares metres with grid cells at the border: a scaled scene changes its output, not ours."""
    layer = mb.MalleableConv2d(2, 2, 3, padding=1, dtype=torch.float64)
    x, depth = torch.randn(1, 2, 6, 6, dtype=torch.float64), steps(1, 6, 6, torch.float64)
    torch.testing.assert_close(layer(x, mb.Geometry(depth * factor, 40.0)), layer(x, mb.Geometry(depth, 40.0)))


@pytest.mark.parametrize("kernels", [1, 2, 3, 5])
def test_2k_plus_3_parameters_beyond_the_weights(kernels: int) -> None:
    layer = mb.MalleableConv2d(4, 6, 3, kernels=kernels)
    assert sum(p.numel() for p in layer.parameters()) == kernels * 4 * 6 * 9 + 6 + 2 * kernels + 3
    assert layer.centers.tolist() == [k - (kernels + 1) / 2 for k in range(kernels + 2)]
    assert layer.temperature.item() == 1.0
    assert layer.temperature.ndim == 0
    assert layer.scales.tolist() == pytest.approx([1 / kernels] * kernels)
    assert layer.gain.item() == 1.0


@pytest.mark.parametrize("learnable", [(), ("centers",), ("centers", "temperature"), ("rebalance",), "temperature"])
def test_learnable_freezes_the_rest(learnable: Any) -> None:
    layer = mb.MalleableConv2d(2, 2, 3, padding=1, learnable=learnable)
    names = {"centers": layer.centers, "temperature": layer.raw_temperature, "rebalance": layer.rebalance}
    chosen = {learnable} if isinstance(learnable, str) else set(learnable)
    assert {name for name, parameter in names.items() if parameter.requires_grad} == chosen
    layer(torch.randn(2, 2, 12, 14), mb.Geometry(steps(), 40.0)).square().sum().backward()
    assert {name for name, parameter in names.items() if parameter.grad is not None} == chosen


@pytest.mark.parametrize("temperature", [1e-4, 0.3, 0.5, 1.0, 2.0, 50.0])
def test_temperature_starts_as_asked(temperature: float) -> None:
    layer = mb.MalleableConv2d(1, 1, 1, temperature=temperature, dtype=torch.float64)
    assert layer.temperature.item() == pytest.approx(temperature, rel=1e-12)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("lr", [0.01, 1.0, 100.0])
def test_temperature_stays_positive_and_alive(optimizer: Any, lr: float) -> None:
    """Pushed towards zero for 1,000 steps, then pulled back."""
    layer = mb.MalleableConv2d(1, 1, 1)
    step = optimizer([layer.raw_temperature], lr=lr)
    for _ in range(1000):
        step.zero_grad()
        layer.temperature.backward()
        step.step()
        assert layer.temperature > 0
        assert layer.raw_temperature.grad is not None
        assert layer.raw_temperature.grad > 0


@pytest.mark.parametrize("raw", [-1e3, -1e10, -3e38])
def test_the_coldest_layers_give_no_nan(raw: float) -> None:
    layer = mb.MalleableConv2d(2, 2, 3, padding=1)
    layer.raw_temperature.data.fill_(raw)
    depth = steps().requires_grad_()
    y = layer(torch.randn(2, 2, 12, 14), mb.Geometry(depth, 40.0))
    y.square().sum().backward()
    assert all(torch.isfinite(v).all() for v in (y, depth.grad, *(p.grad for p in layer.parameters())) if v is not None)


def test_temperature_can_be_set() -> None:
    layer = mb.MalleableConv2d(2, 2, 3)
    for t in (3.0, 0.2):
        layer.temperature = t
        assert layer.temperature.item() == pytest.approx(t)
    with pytest.raises(ValueError, match="temperature must be positive, got -1"):
        layer.temperature = -1.0
    with pytest.raises(ValueError, match=r"too small or too large for torch\.float16"):
        mb.MalleableConv2d(2, 2, 3, temperature=1e-6, dtype=torch.float16)


def test_a_seed_draws_the_weights_of_a_convolution() -> None:
    torch.manual_seed(3)
    conv = nn.Conv2d(4, 6, 3)
    torch.manual_seed(3)
    layer = mb.MalleableConv2d(4, 6, 3, kernels=1)
    assert torch.equal(conv.weight, layer.weight)
    assert layer.bias is not None
    assert torch.equal(conv.bias, layer.bias)


def test_a_field_without_the_center_cannot_start_as_a_convolution() -> None:
    with pytest.raises(ValueError, match="move the centers towards 0"):
        mb.MalleableConv2d.from_conv2d(nn.Conv2d(2, 2, 3), centers=[10, 11, 12, 13, 14], temperature=0.1)


def test_gain_is_exact_under_autocast() -> None:
    conv = nn.Conv2d(2, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        inside = mb.MalleableConv2d.from_conv2d(conv, 2)
    assert inside.gain == mb.MalleableConv2d.from_conv2d(conv, 2).gain


def test_meta_tensors_have_shapes() -> None:
    layer = mb.MalleableConv2d(4, 6, 3, 2, 1, device="meta")
    geometry = mb.Geometry(torch.empty(2, 1, 24, 28, device="meta"), 40.0)
    assert layer(torch.empty(2, 4, 12, 14, device="meta"), geometry).shape == (2, 6, 6, 7)


def test_centers_do_not_pass_through_the_default_device() -> None:
    """Apple's GPUs have no float64; the meta device has no values at all."""
    with torch.device("meta"):
        conv = mb.MalleableConv2d(2, 2, 3, device="cpu")
    assert conv.centers.tolist() == [-2, -1, 0, 1, 2]


def test_temperature_is_smooth_where_it_bends() -> None:
    layer = mb.MalleableConv2d(1, 1, 1, dtype=torch.float64)
    slopes = []
    for raw in (0.5 - 1e-9, 0.5, 0.5 + 1e-9, 1.0):
        layer.raw_temperature.data.fill_(raw)
        slopes.append(torch.autograd.grad(layer.temperature, layer.raw_temperature)[0].item())
    assert slopes == pytest.approx([1.0] * 4, abs=1e-7)


def test_scales_sum_to_one_and_learn() -> None:
    layer = mb.MalleableConv2d(2, 2, 3)
    layer.rebalance.data = torch.tensor([3.0, -1.0, 0.5])
    assert layer.scales.sum().item() == pytest.approx(1)
    torch.testing.assert_close(layer.scales, torch.softmax(torch.tensor([3.0, -1.0, 0.5]), 0))


@pytest.mark.parametrize("cls", CONVOLUTIONS)
def test_weights_are_drawn_like_a_convolutions(cls: Any) -> None:
    layer = cls(64, 32, 3)
    bound = nn.Conv2d(64, 32, 3).weight.abs().max().item()
    assert layer.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert layer.bias.abs().max() <= bound * 1.01
    before = layer.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, before)


def test_reset_puts_the_receptive_field_back() -> None:
    layer = mb.MalleableConv2d(2, 2, 3, centers=[-4, -2, 0, 2, 4], temperature=2.0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
        layer.gain.fill_(7.0)
    layer.reset_parameters()
    assert layer.centers.tolist() == [-4, -2, 0, 2, 4]
    assert (layer.temperature.item(), layer.gain.item()) == (2.0, 1.0)


def test_rate_is_the_inputs_not_the_outputs() -> None:
    """A strided layer measures depth on the grid it samples."""
    layer = mb.MalleableConv2d(1, 1, 3, stride=2, padding=1, bias=False, dtype=torch.float64)
    strided = layer.assign(mb.Geometry(depth := steps(1, 16, 16, torch.float64), 40.0), (8, 8), torch.float64)
    dense = copy.deepcopy(layer)
    dense.window = dense.window._replace(stride=(1, 1))
    torch.testing.assert_close(strided, dense.assign(mb.Geometry(depth, 40.0), (8, 8), torch.float64)[..., ::2, ::2])


def test_a_hole_counts_once_in_a_hard_layer() -> None:
    """The authors' 2.5D layer counts a pixel without depth in all three kernels."""
    layer = mb.Conv25d(1, 1, 3, padding=1)
    depth = steps(1, 8, 8)
    depth[0, 0, 4, 4] = 0
    assign = layer.assign(mb.Geometry(depth, 40.0), (8, 8))
    assert assign.sum(1).max() == 1
    assert (assign[0, 1, :, 4, 4] == 1).all()


@pytest.mark.parametrize("cls", CONVOLUTIONS)
@pytest.mark.parametrize("invalid", ["same", "uniform", "ignore"])
def test_no_nan_reaches_outputs_or_gradients(cls: Any, invalid: str) -> None:
    depth = steps(1)
    depth[0, 0].view(-1)[:60] = torch.tensor([0.0, -1.0, torch.nan, torch.inf, -torch.inf, 1e-30] * 10)
    depth.requires_grad_()
    layer = cls(2, 2, 3, padding=1, invalid=invalid)
    y = layer(torch.randn(1, 2, 12, 14), mb.Geometry(depth, 40.0))
    y.square().sum().backward()
    values = [y, depth.grad, *(p.grad for p in layer.parameters())]
    assert all(torch.isfinite(v).all() for v in values if v is not None)


def test_ignored_taps_are_dropped() -> None:
    layer = mb.MalleableConv2d(2, 2, 3, padding=1, invalid="ignore")
    y = layer(torch.randn(1, 2, 6, 6), mb.Geometry(torch.zeros(1, 1, 6, 6), 40.0))
    assert layer.bias is not None
    torch.testing.assert_close(y, layer.bias.view(1, -1, 1, 1).expand_as(y))


@pytest.mark.parametrize("padding", ["same", "valid", (1, 2), 0])
@pytest.mark.parametrize("kernel", [2, 3, (4, 1)])
def test_output_sizes_are_a_convolutions(padding: Any, kernel: Any) -> None:
    x, geometry = torch.randn(2, 2, 12, 14), mb.Geometry(steps(), 40.0)
    conv = nn.Conv2d(2, 4, kernel, padding=padding)
    layer = mb.MalleableConv2d.from_conv2d(conv)
    assert layer(x, geometry).shape == conv(x).shape
    flat = mb.Geometry(torch.ones(2, 1, 12, 14), 40.0)
    torch.testing.assert_close(layer(x, flat), conv(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", CONVOLUTIONS)
def test_empty_batch(cls: Any) -> None:
    layer = cls(2, 4, 3, padding=1)
    y = layer(torch.empty(0, 2, 6, 6), mb.Geometry(torch.empty(0, 1, 6, 6), torch.empty(0)))
    assert y.shape == (0, 4, 6, 6)
    y.sum().backward()
    assert (layer.weight.grad == 0).all()


@pytest.mark.parametrize("groups", [1, 4])
def test_memory_layouts(groups: int) -> None:
    layer = mb.MalleableConv2d(4, 8, 3, 2, 1, groups=groups)
    geometry = mb.Geometry(steps(), 40.0)
    x = torch.randn(2, 4, 12, 14)
    expected = layer(x, geometry)
    expected_gradient = torch.autograd.grad(expected.square().sum(), layer.weight)[0]
    strange = torch.randn(2, 12, 28, 4).permute(0, 3, 1, 2)[..., ::2].copy_(x)  # neither layout
    for features in (x.to(memory_format=torch.channels_last), strange):
        torch.testing.assert_close(layer(features, geometry), expected)
    channels_last = copy.deepcopy(layer).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert channels_last.weight.is_contiguous(memory_format=torch.channels_last)
    y = channels_last(x.to(memory_format=torch.channels_last), geometry)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, expected)
    gradient = torch.autograd.grad(y.square().sum(), channels_last.weight)[0]
    torch.testing.assert_close(gradient, expected_gradient)


def test_conversion_keeps_channels_last_and_frozen_weights() -> None:
    conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    conv.weight.requires_grad_(False)
    layer = mb.MalleableConv2d.from_conv2d(conv)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    assert not layer.weight.requires_grad
    assert layer.bias is not None
    assert layer.bias.requires_grad


@pytest.mark.parametrize("cls", [*CONVOLUTIONS, mb.DepthAwareAvgPool2d])
def test_copies(cls: Any) -> None:
    layer = cls(2) if cls is mb.DepthAwareAvgPool2d else cls(2, 4, 3, padding=1, groups=2)
    x, geometry = torch.randn(2, 2, 12, 14), mb.Geometry(steps(), 40.0)
    y = layer(x, geometry)
    fresh = copy.deepcopy(layer)
    for parameter in fresh.parameters():
        nn.init.constant_(parameter, 0.1)
    fresh.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert torch.equal(other(x, geometry), y)


def test_repr_tells_what_differs_from_the_defaults() -> None:
    layer = mb.MalleableConv2d(4, 8, 3, 2, 1, 2, 2, False, kernels=5, invalid="ignore")
    assert repr(layer) == (
        "MalleableConv2d(4, 8, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(2, 2), groups=2, "
        "bias=False, kernels=5, invalid='ignore')"
    )
    assert "learnable=('centers',)" in repr(mb.MalleableConv2d(4, 8, 3, learnable=("centers",)))
    assert repr(mb.DepthAwareAvgPool2d(2)) == (
        "DepthAwareAvgPool2d(kernel_size=(2, 2), stride=(2, 2), padding=(0, 0), alpha=8.3)"
    )


@pytest.mark.parametrize("kernel", [2, 3])
def test_pooling_flat_depth_is_average_pooling(kernel: int) -> None:
    x = torch.randn(2, 3, 12, 14)
    pool, plain = mb.DepthAwareAvgPool2d(kernel, 2, 1), nn.AvgPool2d(kernel, 2, 1, count_include_pad=False)
    torch.testing.assert_close(pool(x, mb.Geometry(torch.zeros(2, 1, 12, 14), 40.0)), plain(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernels": 0}, "kernels must be at least 1"),
        ({"kernels": 2.0}, "kernels must be a whole number, got 2.0"),
        ({"kernels": True}, "kernels must be a whole number, got True"),
        ({"kernels": np.array([1, 2])}, "kernels must be a whole number, got array"),
        ({"stride": np.array([1, 1])}, r"stride must be an integer ≥ 1 or a pair of them, got array"),
        ({"centers": 5}, "centers must be K \\+ 2 = 5 numbers, got 5"),
        ({"centers": [0, 1, 2]}, "centers must have K \\+ 2 = 5 entries, all finite, got 3"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": -1.0}, "temperature"),
        ({"learnable": ("centres",)}, "learnable .* got \\['centres'\\]"),
        ({"invalid": "drop"}, "invalid must be one of"),
        ({"centers": [0, 1, 2, 3, float("nan")]}, "all finite"),
        ({"groups": 0}, "divisible by groups=0"),
        ({"groups": 3}, "in_channels must be positive and divisible by groups=3, got 4"),
        ({"in_channels": 0}, "in_channels"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mb.MalleableConv2d(**{"in_channels": 4, "out_channels": 6, "kernel_size": 3, **arguments})


def test_wrong_pools_are_refused() -> None:
    with pytest.raises(ValueError, match="padding must be a number or a pair"):
        mb.DepthAwareAvgPool2d(2, padding="same")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x must have shape"):
        mb.DepthAwareAvgPool2d(2)(torch.ones(4), mb.Geometry(steps(), 40.0))


@pytest.mark.parametrize("alpha", [-1.0, float("nan")])
def test_wrong_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        mb.DepthAwareConv2d(1, 1, 1, alpha=alpha)


@pytest.mark.parametrize(
    ("x", "geometry", "error", "message"),
    [
        (torch.ones(4, 12, 14), mb.Geometry(steps(), 40.0), ValueError, "x must have shape"),
        (torch.ones(2, 3, 12, 14), mb.Geometry(steps(), 40.0), ValueError, "x must have 4 channels, got 3"),
        (torch.ones(2, 4, 12, 14).int(), mb.Geometry(steps(), 40.0), TypeError, "floating point"),
        (torch.ones(2, 4, 12, 14).double(), mb.Geometry(steps(), 40.0), TypeError, "x is torch.float64 but weight"),
        (torch.ones(3, 4, 12, 14), mb.Geometry(steps(), 40.0), ValueError, "batch of 2 .* batch of 3"),
        (torch.ones(2, 4, 14, 12), mb.Geometry(steps(2, 24, 48), 40.0), ValueError, "cannot come from an image"),
        (torch.ones(2, 4, 24, 28), mb.Geometry(steps(), 40.0), ValueError, "cannot come from an image"),
        (torch.ones(2, 4, 12, 14), torch.ones(2, 1, 12, 14), TypeError, "geometry must be"),
        (torch.ones(2, 4, 2, 2), mb.Geometry(steps(2, 2, 2), 40.0), ValueError, "x of 2×2 is smaller than kernel_size"),
        (torch.ones(2, 4, 12, 14, device="meta"), mb.Geometry(steps(), 40.0), ValueError, "x is on meta but weight"),
    ],
)
def test_wrong_inputs_are_refused(x: Tensor, geometry: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mb.MalleableConv2d(4, 6, 3)(x, geometry)


def test_convolutions_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(ValueError, match="padding_mode='reflect'"):
        mb.MalleableConv2d.from_conv2d(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"))
    with pytest.raises(TypeError, match="in its own way"):
        mb.MalleableConv2d.from_conv2d(torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 2, 3)))

    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean())

    with pytest.raises(TypeError, match="Standardised"):
        mb.MalleableConv2d.from_conv2d(Standardised(2, 2, 3))

    class Doubled(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return 2 * super()._conv_forward(input, weight, bias)

    with pytest.raises(TypeError, match="Doubled"):
        mb.MalleableConv2d.from_conv2d(Doubled(2, 2, 3))
    patched = nn.Conv2d(2, 2, 3)
    patched.forward = lambda x: x  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError, match="in its own way"):
        mb.MalleableConv2d.from_conv2d(patched)


@pytest.mark.parametrize(
    "changed",
    [torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm, lambda c: prune.l1_unstructured(c, "weight", 1)],
    ids=["spectral norm", "weight norm", "pruning"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_are_refused(changed: Any) -> None:
    conv2d = changed(nn.Conv2d(2, 2, 3))
    with torch.no_grad():
        conv2d(torch.ones(1, 2, 3, 3))
    with pytest.raises(TypeError, match="in its own way"):
        mb.MalleableConv2d.from_conv2d(conv2d)


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_full_backward_hook", "register_load_state_dict_pre_hook"]
)
def test_hooks_are_not_lost_silently(register: str) -> None:
    conv2d = nn.Conv2d(2, 2, 3)
    getattr(conv2d, register)(lambda *_: None)
    with pytest.raises(ValueError, match="conv2d has hooks, which would be lost"):
        mb.MalleableConv2d.from_conv2d(conv2d)


def test_an_assignment_of_its_own_is_used() -> None:
    layer, x = mb.MalleableConv2d(4, 4, 3, padding=1), torch.randn(1, 4, 8, 8)
    geometry = mb.Geometry(torch.rand(1, 1, 8, 8) + 1, 50.0)
    nothing = torch.zeros_like(layer.assign(geometry, (8, 8)))
    layer.assign = lambda *_: nothing  # type: ignore[method-assign]
    expected = layer.bias.view(1, -1, 1, 1).expand(1, 4, 8, 8)
    torch.testing.assert_close(layer(x, geometry), expected)


@pytest.mark.parametrize("name", ["kernel_size", "stride", "padding", "dilation"])
def test_the_window_cannot_change_under_a_layer(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(mb.MalleableConv2d(2, 2, 3), name, (2, 2))


def test_depth_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="depth must be a tensor, got list"):
        mb.Geometry([[[[1.0]]]], 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [mb.MalleableConv2d, mb.Conv25d, mb.DepthAwareConv2d])
def test_a_receptive_field_is_asked_with_a_number_too(kind: Any) -> None:
    layer = kind(1, 1, 3)
    assert torch.equal(layer.receptive_field(0.5), layer.receptive_field(torch.tensor(0.5)))
