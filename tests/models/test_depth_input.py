from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Conv2dSame, ScaledStdConv2d, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import malleable as mb
from helpers.networks import Tiny, lively, scene
from malleable.models.cost import measure
from malleable.models.depth_input import Kind, depth_channel

KINDS: list[Kind] = ["metric", "relative"]


def trained(
    kind: Kind, conv: str | None = "malleable", model: type[Tiny] = Tiny, **options: Any
) -> mb.models.convert.Converted:
    """A converted network whose weights of the channel are no longer zero."""
    net = mb.convert(lively(model()), conv, depth_input=kind, **options)
    assert net.depth_input is not None
    nn.init.normal_(net.depth_input.conv.weight, generator=torch.Generator().manual_seed(0))
    return net


@pytest.mark.parametrize("conv", [None, "malleable", "conv25d", "depth_aware"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_network_starts_as_it_was(conv: str | None, kind: Kind) -> None:
    model = lively(Tiny())
    rgb, depth = scene()
    net = mb.convert(model, conv, depth_input=kind)
    without = mb.convert(model, conv)
    assert torch.equal(net(rgb, depth=depth, focal=60.0), without(rgb, depth=depth, focal=60.0))
    output = net(rgb, depth=depth, focal=60.0).sum()
    output.backward()
    gradient = dict(net.named_parameters())["depth_input.conv.weight"].grad
    assert gradient is not None
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_first_convolution_with_a_fourth_channel(kind: Kind) -> None:
    net = trained(kind, None)
    assert net.depth_input is not None
    rgb, depth = scene()
    stem: Any = net.model.stem
    weight = torch.cat([stem.weight, net.depth_input.conv.weight], dim=1)
    assert weight.shape == (8, 4, 3, 3)
    image = torch.cat([rgb, depth_channel(depth, kind)], dim=1)
    wide = F.conv2d(image, weight, stem.bias, stem.stride, stem.padding)
    expected = net.model.stage2(net.model.stage1(wide))
    torch.testing.assert_close(net(rgb, depth=depth), expected, rtol=1e-4, atol=1e-4)


def test_metric_is_depth_over_four_metres() -> None:
    depth = torch.tensor([[[[0.0, 2.0, 8.0]]]])
    assert depth_channel(depth, "metric").flatten().tolist() == [0.0, 0.5, 2.0]


def test_relative_is_log_depth_minus_its_median() -> None:
    _, depth = scene(batch=1, height=15, width=15)
    depth[0, 0, 0, 0] = 0 if (depth > 0).sum() % 2 == 0 else depth[0, 0, 0, 0]  # an odd number of pixels is known
    known = depth.numpy() > 0
    logs = np.log(depth.numpy()[known])
    channel = depth_channel(depth, "relative").numpy()
    assert (channel[~known] == 0).all()
    np.testing.assert_allclose(channel[known], logs - np.median(logs), atol=1e-6)


def test_each_image_has_a_median_of_its_own_and_none_is_no_trouble() -> None:
    _, depth = scene(batch=3)
    depth[1] *= 100
    depth[2] = 0
    channel = depth_channel(depth, "relative")
    assert channel.isfinite().all()
    assert not channel[2].any()
    for index in range(2):
        torch.testing.assert_close(channel[index : index + 1], depth_channel(depth[index : index + 1], "relative"))


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-3, 1e3), st.sampled_from([torch.float32, torch.float64]))
def test_the_relative_channel_and_layers_do_not_see_the_scale_of_depth(factor: float, dtype: torch.dtype) -> None:
    net = NETS[dtype]
    rgb, depth = (tensor.to(dtype) for tensor in scene(batch=1, height=32, width=32))
    expected = net(rgb, depth=depth, focal=60.0)
    output = net(rgb, depth=depth * factor, focal=60.0)
    assert (output - expected).abs().max() <= 2e-5 * expected.abs().max()
    power = 2.0 ** round(np.log2(factor))
    assert torch.equal(net(rgb, depth=depth * power, focal=60.0), expected)


NETS = {dtype: trained("relative").to(dtype) for dtype in (torch.float32, torch.float64)}


def test_the_metric_channel_sees_the_scale() -> None:
    net = trained("metric", None)
    rgb, depth = scene()
    output, other = (net(rgb, depth=depth * factor) for factor in (1, 1000))
    assert (output - other).abs().max() > 0.1 * output.abs().max()


def test_standardised_weights_stay_exact() -> None:
    model = lively(nn.Sequential(StdConv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)))
    rgb, depth = scene()
    net = mb.convert(model, None, depth_input="relative")
    assert torch.equal(net(rgb, depth=depth), model(rgb))


@pytest.mark.parametrize("size", [(64, 64), (33, 46)])
@pytest.mark.parametrize(
    ("make", "plain"),
    [(StdConv2d, nn.Conv2d), (ScaledStdConv2d, nn.Conv2d), (StdConv2dSame, Conv2dSame), (Conv2dSame, Conv2dSame)],
)
def test_the_channel_is_padded_as_the_image_and_not_standardised(
    make: type[nn.Conv2d], plain: type[nn.Conv2d], size: tuple[int, int]
) -> None:
    options = {"stride": 2, **({"padding": 1} if plain is nn.Conv2d else {})}
    stem, other = make(3, 8, 3, **options), plain(1, 8, 3, bias=False, **options)
    net = mb.convert(nn.Sequential(stem), None, depth_input="metric")
    net.load_state_dict({**net.state_dict(), "depth_input.conv.weight": other.weight})
    rgb, depth = scene(height=size[0], width=size[1])
    torch.testing.assert_close(net(rgb, depth=depth), stem(rgb) + other(depth / 4))


@pytest.mark.parametrize("make", [nn.Conv2d, StdConv2d])
def test_hooks_of_the_first_convolution_run_once(make: type[nn.Conv2d]) -> None:
    model = nn.Sequential(make(3, 8, 3), nn.ReLU())
    model[0].register_forward_pre_hook(lambda conv, args: (args[0].expand(-1, 3, -1, -1),))
    model[0].register_forward_hook(lambda conv, args, output: output + 1)
    rgb, depth = scene()
    net = mb.convert(model, None, depth_input="metric")
    assert torch.equal(net(rgb, depth=depth), model(rgb))


def test_also_where_the_first_convolution_itself_is_replaced() -> None:
    model = lively(Tiny())
    rgb, _ = scene()
    flat = torch.full((2, 1, 64, 64), 2.0)
    net = mb.convert(model, where="all", depth_input="metric")
    torch.testing.assert_close(net(rgb, depth=flat, focal=60.0), model(rgb), rtol=1e-4, atol=1e-4)
    assert net.depth_input is not None
    nn.init.ones_(net.depth_input.conv.weight)
    assert (net(rgb, depth=flat, focal=60.0) - model(rgb)).abs().max() > 0.1


@pytest.mark.parametrize("where", ["first-of-stage", "all"])
def test_copies_and_pickles_have_a_channel_of_their_own(where: str) -> None:
    net = trained("relative", where=where)
    rgb, depth = scene()
    expected = net(rgb, depth=depth, focal=60.0)
    twin = copy.deepcopy(net)
    assert twin.depth_input is not None
    nn.init.zeros_(twin.depth_input.conv.weight)
    assert not torch.equal(twin(rgb, depth=depth, focal=60.0), expected)
    assert torch.equal(pickle.loads(pickle.dumps(net))(rgb, depth=depth, focal=60.0), expected)


def test_an_exported_program_has_the_same_median() -> None:
    net = trained("relative", None)
    rgb, depth = scene()
    program = torch.export.export(net, (rgb,), {"depth": depth})
    depth = torch.cat([torch.zeros(1, 1, 64, 64), depth[:1] * 3])
    torch.testing.assert_close(program.module()(rgb, depth=depth), net(rgb, depth=depth))


class Breaking(Tiny):
    """Breaks its graph, after which compilers keep the frames of its parts, to be used for other networks too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        torch._dynamo.graph_break()
        return self.stage2(self.stage1(x))


@pytest.mark.parametrize("model", [Tiny, Breaking])
def test_compiled_it_is_the_same_whatever_was_compiled_before(model: type[Tiny]) -> None:
    rgb, depth = scene()
    plain = mb.convert(lively(model()))
    for net in (plain, trained("relative", model=model), trained("metric", model=model), plain):
        compiled = torch.compile(net, backend="eager", fullgraph=model is Tiny)
        torch.testing.assert_close(compiled(rgb, depth=depth, focal=60.0), net(rgb, depth=depth, focal=60.0))


def test_names_and_order_are_those_of_the_network_then_its_own() -> None:
    net, plain = (mb.convert(Tiny(), where="all", depth_input=kind) for kind in ("metric", None))
    assert list(net.state_dict()) == [*plain.state_dict(), "depth_input.conv.weight"]
    parameters = [name for name, _ in net.named_parameters()]
    assert parameters == [*(name for name, _ in plain.named_parameters()), "depth_input.conv.weight"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_runs_it_again(use_reentrant: bool) -> None:
    net = trained("relative")
    twin = copy.deepcopy(net)
    twin.model.stem = Again(twin.model.stem, use_reentrant)
    rgb, depth = scene()
    for each in (net, twin):
        each(rgb.requires_grad_(), depth=depth, focal=60.0).sum().backward()
    first, second = (each.get_parameter("depth_input.conv.weight").grad for each in (net, twin))
    torch.testing.assert_close(first, second)


class Again(nn.Module):
    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


def test_original_weights_load_beside_it() -> None:
    other = lively(Tiny(), seed=5)
    net = mb.convert(Tiny(), depth_input="metric").eval()
    net.load_original(other.state_dict())
    rgb, _ = scene()
    flat = torch.full((2, 1, 64, 64), 2.0)
    torch.testing.assert_close(net(rgb, depth=flat, focal=60.0), other(rgb), rtol=1e-4, atol=1e-4)
    assert net.original_state().keys() == other.state_dict().keys()


def test_its_multiply_adds_count() -> None:
    plain, wide = (mb.convert(Tiny(), None, depth_input=kind) for kind in (None, "metric"))
    assert measure(wide, (64, 64)).products - measure(plain, (64, 64)).products == 32 * 32 * 9 * 8


def patched(conv: nn.Conv2d) -> nn.Conv2d:
    vars(conv)["forward"] = conv.forward
    return conv


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class NoConvolution(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (Tiny(), "log", "depth_input must be None, 'metric' or 'relative', got 'log'"),
        (nn.Conv2d(3, 3, 3, groups=3), "metric", "has groups and cannot be widened"),
        (NoConvolution(), "metric", "depth_input='metric' runs the network .* and found none"),
        (patched(nn.Conv2d(3, 3, 3)), "metric", "has had its forward replaced"),
        (spectral_norm(nn.Conv2d(3, 3, 3)), "metric", ", the first convolution, has a parametrized weight"),
        (Doubled(3, 3, 3), "metric", "is a Doubled, which computes its output in its own way"),
        (nn.Linear(3, 3), "metric", "depth_input='metric' runs the network .* which failed"),
    ],
)
def test_refusals(model: nn.Module, kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mb.convert(model, None, depth_input=kind)


def test_depth_must_be_given() -> None:
    rgb, _ = scene()
    with pytest.raises(ValueError, match="depth is missing"):
        mb.convert(Tiny(), None, depth_input="metric")(rgb)


def test_depth_of_another_batch_is_refused() -> None:
    net = mb.convert(nn.Conv2d(3, 4, 3), None, depth_input="metric")
    for images, maps in ((1, 4), (4, 1)):
        with pytest.raises(ValueError, match=f"depth has a batch of {maps} maps, .* a batch of {images} samples"):
            net(scene(images)[0], depth=scene(maps)[1])


def test_a_network_that_pads_its_image_gets_no_channel() -> None:
    model = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 3))
    with pytest.raises(ValueError, match=r"depth_input='metric': the network pads the image before 1, its first"):
        mb.convert(model, where="all", depth_input="metric")
