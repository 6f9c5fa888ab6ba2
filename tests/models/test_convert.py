"""Conversion of networks from timm, torchvision and segmentation_models_pytorch, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from torch import Tensor, nn

import malleable as mb
from helpers.networks import Tiny, lively, relative_error, scene
from malleable.models.convert import Converted, Placed


def tensors(output: Any) -> list[Tensor]:
    """The tensors of a network's output, whatever it is."""
    return [output] if isinstance(output, Tensor) else [output["out"]] if "out" in output else list(output)


class ConvertTester:
    """What must hold for every family. A subclass names a network and the convolutions that the paper's rule picks."""

    make: ClassVar[Callable[[], nn.Module]]
    expected: ClassVar[dict[str, float]]  # name → rate of its input

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls) -> tuple[nn.Module, Converted]:
        torch.manual_seed(0)
        model = lively(cls.make())
        return model, mb.convert(model)

    def test_finds_the_first_convolution_of_every_stage(self, pair: tuple[nn.Module, Converted]) -> None:
        assert {placed.name: placed.rate for placed in pair[1].placed} == self.expected

    @pytest.mark.parametrize("depth_of", ["flat", "missing"])
    @torch.inference_mode()
    def test_starts_as_the_network_it_was(self, pair: tuple[nn.Module, Converted], depth_of: str) -> None:
        model, net = pair
        rgb, depth = scene()
        flat = torch.full_like(depth, 2.5 if depth_of == "flat" else 0.0)
        for actual, original in zip(tensors(net(rgb, depth=flat, focal=60.0)), tensors(model(rgb)), strict=True):
            assert actual.shape == original.shape
            assert relative_error(actual, original) < 1e-5

    @torch.inference_mode()
    def test_depth_changes_the_output(self, pair: tuple[nn.Module, Converted]) -> None:
        model, net = pair
        rgb, depth = scene()
        assert relative_error(tensors(net(rgb, depth=depth, focal=60.0))[-1], tensors(model(rgb))[-1]) > 1e-4

    def test_state_dict_loads(self, pair: tuple[nn.Module, Converted]) -> None:
        net = pair[1]
        other = mb.convert(type(self).make()).eval()
        other.load_state_dict(net.state_dict())
        rgb, depth = scene()
        with torch.inference_mode():
            outputs = [tensors(n(rgb, depth=depth, focal=60.0))[-1] for n in (net, other)]
        assert torch.equal(*outputs)


class TestTimmResNet(ConvertTester):
    make = staticmethod(lambda: timm.create_model("resnet18", num_classes=10))
    expected: ClassVar = {f"layer{n}.0.conv1": rate for n, rate in zip((1, 2, 3, 4), (4, 4, 8, 16), strict=True)}


class TestTimmBottleneckResNetDeepStem(ConvertTester):
    make = staticmethod(lambda: timm.create_model("resnet26d", num_classes=10))
    expected: ClassVar = {f"layer{n}.0.conv2": rate for n, rate in zip((1, 2, 3, 4), (4, 4, 8, 16), strict=True)}


class TestTimmResNeXtFeatures(ConvertTester):
    make = staticmethod(lambda: timm.create_model("resnext26ts", features_only=True, output_stride=16))
    expected: ClassVar = {
        f"stages_{n}.0.conv2_kxk.conv": rate for n, rate in zip((0, 1, 2, 3), (4, 4, 8, 16), strict=True)
    }


class TestTimmRegNet(ConvertTester):
    make = staticmethod(lambda: timm.create_model("regnety_002", num_classes=10))
    expected: ClassVar = {f"s{n}.b1.conv2.conv": rate for n, rate in zip((1, 2, 3, 4), (2, 4, 8, 16), strict=True)}


class TestTimmConvNeXt(ConvertTester):
    make = staticmethod(lambda: timm.create_model("convnext_atto", num_classes=10))
    expected: ClassVar = {
        f"stages.{n}.blocks.0.conv_dw": rate for n, rate in zip((0, 1, 2, 3), (4, 8, 16, 32), strict=True)
    }


class TestTimmMobileNet(ConvertTester):
    make = staticmethod(lambda: timm.create_model("mobilenetv3_small_100", num_classes=10))
    expected: ClassVar = {
        f"blocks.{n}.0.conv_dw": rate for n, rate in zip((0, 1, 2, 3, 4), (2, 4, 8, 16, 16), strict=True)
    }


class TestTorchvisionEfficientNet(ConvertTester):
    make = staticmethod(lambda: torchvision.models.efficientnet_b0(num_classes=10))
    expected: ClassVar = {
        "features.1.0.block.0.0": 2,
        **{f"features.{n}.0.block.1.0": r for n, r in zip(range(2, 8), (2, 4, 8, 16, 16, 32), strict=True)},
    }


class TestTorchvisionMobileNet(ConvertTester):
    """A flat list of units, the stem among them."""

    make = staticmethod(lambda: torchvision.models.mobilenet_v2(num_classes=10))
    expected: ClassVar = {
        "features.1.conv.0.0": 2,
        **{
            f"features.{n}.conv.1.0": rate for n, rate in zip((2, 4, 7, 11, 14, 17), (2, 4, 8, 16, 16, 32), strict=True)
        },
    }


class TestTorchvisionRegNet(ConvertTester):
    make = staticmethod(lambda: torchvision.models.regnet_x_400mf(num_classes=10))
    expected: ClassVar = {
        f"trunk_output.block{n}.block{n}-0.f.b.0": rate for n, rate in zip((1, 2, 3, 4), (2, 4, 8, 16), strict=True)
    }


class TestTorchvisionDilatedDeepLab(ConvertTester):
    """Output stride 8: the last two stages change channels but not size, and the head's convolutions are no units."""

    make = staticmethod(
        lambda: torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=5)
    )
    expected: ClassVar = {
        f"backbone.layer{n}.0.conv2": rate for n, rate in zip((1, 2, 3, 4), (4, 4, 8, 8), strict=True)
    }


class TestSmpUnet(ConvertTester):
    make = staticmethod(lambda: smp.Unet("resnet18", encoder_weights=None, classes=5))
    expected: ClassVar = {
        f"encoder.layer{n}.0.conv1": rate for n, rate in zip((1, 2, 3, 4), (4, 4, 8, 16), strict=True)
    }


class TestSmpLinknet(ConvertTester):
    """Its decoder adds maps too, but in another place than the units of the encoder."""

    make = staticmethod(lambda: smp.Linknet("resnet18", encoder_weights=None, classes=5))
    expected: ClassVar = TestSmpUnet.expected


class TestSmpDeepLab(ConvertTester):
    make = staticmethod(
        lambda: smp.DeepLabV3Plus("resnet18", encoder_weights=None, encoder_output_stride=16, classes=5)
    )
    expected: ClassVar = TestSmpUnet.expected


class TestWhere:
    def test_all_leaves_only_pointwise_convolutions(self) -> None:
        net = mb.convert(Tiny(), where="all")
        assert list(net.layers()) == ["stem", *[f"stage{s}.{u}.spatial" for s in (1, 2) for u in (0, 1)]]
        assert all(max(m.kernel_size) == 1 for m in net.modules() if isinstance(m, nn.Conv2d))

    def test_names_and_globs(self) -> None:
        assert list(mb.convert(Tiny(), where=["stem", "stage2.*.spatial"]).layers()) == [
            "stem",
            "stage2.0.spatial",
            "stage2.1.spatial",
        ]

    def test_a_predicate_sees_name_and_convolution(self) -> None:
        net = mb.convert(Tiny(), where=lambda name, conv: name != "stem" and conv.stride == (2, 2))
        assert list(net.layers()) == ["stage2.0.spatial"]

    @pytest.mark.parametrize("where", ["stage9.*", ["stem", "stage1.0.reduce"], lambda name, conv: False])
    def test_finding_nothing_is_an_error(self, where: Any) -> None:
        with pytest.raises(ValueError, match=r"where.*(matches no|finds nothing)"):
            mb.convert(Tiny(), where=where)

    def test_without_residual_units_the_error_says_what_else_where_may_be(self) -> None:
        with pytest.raises(ValueError, match="'all', names, globs or a function"):
            mb.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)))

    def test_a_sum_of_two_inputs_is_no_residual_unit(self) -> None:
        class Fuse(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(4, 4, 3, padding=1)

            def forward(self, x: Tensor, skip: Tensor) -> Tensor:
                return self.conv(x) + skip

        class Decoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second, self.fuse = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1), Fuse()

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x)
                return self.fuse(self.second(x), x)

        with pytest.raises(ValueError, match="finds nothing to replace in Decoder, which has 3"):
            mb.convert(Decoder())

    def test_a_network_that_the_example_does_not_suit(self) -> None:
        class Picky(Tiny):
            def forward(self, x: Tensor) -> Tensor:
                if x.shape[-1] != 48:
                    raise ValueError("only 48 pixels will do")
                return super().forward(x)

        with pytest.raises(ValueError, match=r"only 48 pixels will do.*pass example="):
            mb.convert(Picky())
        assert mb.convert(Picky(), where=["stem"]).placed == (Placed("stem", None, None),)
        net = mb.convert(Picky(), example=torch.empty(1, 3, 48, 48))
        assert net.placed == (Placed("stage1.0.spatial", None, 2), Placed("stage2.0.spatial", None, 2))

    def test_a_convolution_used_under_two_names_stays_one_layer(self) -> None:
        model = Tiny()
        model.stage1[1] = model.stage1[0]
        net = mb.convert(model, where=["stage1.*"])
        assert net.model.stage1[0].spatial is net.model.stage1[1].spatial
        rgb, depth = scene()
        assert relative_error(net(rgb, depth=torch.ones_like(depth), focal=60.0), model(rgb)) < 1e-5

    @pytest.mark.parametrize("where", [["1"], ["0", "1"], ["1", "2"]])
    def test_each_name_of_a_convolution_may_name_it(self, where: list[str]) -> None:
        shared = nn.Conv2d(3, 3, 3)
        net = mb.convert(nn.Sequential(shared, shared, nn.Conv2d(3, 3, 3)), where=where)
        assert list(net.layers()) == ["0", "2"][: 2 if "2" in where else 1]

    def test_all_names_of_a_convolution_are_in_the_state_dict(self) -> None:
        shared = nn.Conv2d(3, 3, 3, padding=1)
        model = nn.Sequential(shared, nn.ReLU(), shared)
        net = mb.convert(model, where="all")
        assert net.original_state().keys() == model.state_dict().keys()
        other = nn.Conv2d(3, 3, 3)
        net.load_original({f"{place}.{key}": value for place in (0, 2) for key, value in other.state_dict().items()})
        assert torch.equal(net.layers()["0"].weight, torch.cat([other.weight] * 3))

    @pytest.mark.parametrize(
        "hold", [list, lambda convs: [partial(conv) for conv in convs], lambda convs: dict.fromkeys(convs)]
    )
    def test_a_convolution_that_is_held_outside_of_modules_too(self, hold: Any) -> None:
        class Held(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
                self.steps = hold([self.first, self.second])

            def forward(self, x: Tensor) -> Tensor:
                for step in self.steps:
                    x = step(x)
                return x

        model = Held()
        rgb, depth = scene()
        net, plain = (mb.convert(m, where="all") for m in (model, nn.Sequential(model.first, model.second)))
        assert torch.equal(net(rgb, depth=depth, focal=60.0), plain(rgb, depth=depth, focal=60.0))

    def test_an_argument_given_by_name(self) -> None:
        class Named(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 3, 3, padding=1)

            def forward(self, x: Tensor) -> Tensor:
                return self.conv(input=x)

        model = Named()
        rgb, depth = scene()
        flat = torch.ones_like(depth)
        actual = mb.convert(model, where="all")(rgb, depth=flat, focal=60.0)
        assert relative_error(actual, model(rgb)) < 1e-5

    @pytest.mark.parametrize("make", [nn.Conv2d, timm.layers.StdConv2d])
    def test_strides_and_dilations_that_were_set_as_numbers(self, make: type[nn.Conv2d]) -> None:
        model = Tiny()
        model.stage2[0].spatial = make(12, 12, 3, 1, 1)
        for unit in (model.stage2[0].spatial, model.stage2[0].shortcut):
            unit.stride, unit.dilation = 2, 1
        rgb, depth = scene()
        net = mb.convert(model)
        assert list(net.layers()) == ["stage1.0.spatial", "stage2.0.spatial"]
        assert relative_error(net(rgb, depth=torch.ones_like(depth), focal=60.0), model(rgb)) < 1e-5

    def test_a_convolution_that_did_not_run_is_named(self) -> None:
        class Functional(Tiny):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Conv2d(12, 4, 3)

            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.conv2d(super().forward(x), self.head.weight)

        with pytest.warns(UserWarning, match="Functional did not run head on an example image"):
            mb.convert(Functional(), where="all")

    @pytest.mark.parametrize("where", [5, None, [1]])
    def test_other_types_are_refused(self, where: Any) -> None:
        with pytest.raises(TypeError, match="where must be"):
            mb.convert(Tiny(), where=where)

    def test_a_bare_convolution(self) -> None:
        conv = nn.Conv2d(3, 4, 3, padding=1)
        rgb, depth = scene()
        net = mb.convert(conv, where="all")
        assert relative_error(net(rgb, depth=torch.ones_like(depth), focal=60.0), conv(rgb)) < 1e-5
        net.load_original(nn.Conv2d(3, 4, 3, padding=1).state_dict())
        assert net.original_state().keys() == conv.state_dict().keys()


class TestConv:
    @pytest.mark.parametrize(
        ("conv", "kernels", "layer"),
        [("malleable", 2, mb.MalleableConv2d), ("conv25d", 5, mb.Conv25d), ("depth_aware", 3, mb.DepthAwareConv2d)],
    )
    def test_kinds_and_options(self, conv: str, kernels: int, layer: type[nn.Module]) -> None:
        model = Tiny()
        net = mb.convert(model, conv, kernels, invalid="ignore")
        placed = net.layers().values()
        assert [type(m) for m in placed] == [layer, layer]
        assert {m.kernels for m in placed} == {1 if conv == "depth_aware" else kernels}
        assert {m.invalid for m in placed} == {"ignore"}
        rgb, depth = scene()
        assert relative_error(net(rgb, depth=torch.ones_like(depth), focal=60.0), model(rgb)) < 1e-5

    def test_none_is_a_baseline_that_takes_depth(self) -> None:
        model = Tiny()
        rgb, depth = scene()
        net = mb.convert(model, conv=None)
        assert torch.equal(net(rgb, depth=depth, focal=60.0), model(rgb))
        assert torch.equal(net(rgb), model(rgb))

    def test_depth_aware_has_one_kernel(self) -> None:
        with pytest.raises(ValueError, match="kernels must be 1 for conv='depth_aware'"):
            mb.convert(Tiny(), "depth_aware", kernels=5)

    def test_unknown_kind(self) -> None:
        with pytest.raises(ValueError, match="conv must be None or one of 'malleable'"):
            mb.convert(Tiny(), "malleabel")

    def test_options_of_no_layer_are_refused_without_layers_too(self) -> None:
        assert mb.convert(Tiny(), None, temperature=2.0, invalid="ignore").placed == ()
        for refuse in (
            lambda: mb.convert(Tiny(), None, temprature=2.0),
            lambda: mb.convert(Tiny(), None, in_channels=7),
            lambda: mb.deeplabv3plus("resnet18", 5, conv=None, pretrained=False, wdith=64),
            lambda: mb.deeplabv3plus("resnet18", 5, stages=(), pretrained=False, temprature=2.0),
        ):
            with pytest.raises(TypeError, match=r"there is no option '(temprature|in_channels|wdith)'"):
                refuse()

    def test_marks_on_a_convolution_stay(self) -> None:
        model = Tiny()
        model.stage2[0].spatial.mark = "kept"
        model.stage2[0].spatial.assign = "the name of something that layers have"
        found = mb.convert(model).model.stage2[0].spatial
        assert isinstance(found, mb.MalleableConv2d)
        assert found.mark == "kept"
        assert callable(found.assign)


class TestRefusals:
    def test_converting_twice(self) -> None:
        net = mb.convert(Tiny())
        for converted in (net, net.model):
            with pytest.raises(ValueError, match="already has depth-seeing convolutions"):
                mb.convert(converted)

    def test_padding_mode_and_module_are_named(self) -> None:
        model = Tiny()
        model.stage2[0].spatial = nn.Conv2d(12, 12, 3, 2, 1, padding_mode="reflect")
        with pytest.raises(ValueError, match=r"stage2\.0\.spatial.*padding_mode='reflect'"):
            mb.convert(model)

    def test_convolutions_with_a_forward_of_their_own(self) -> None:
        class Doubled(nn.Conv2d):
            def forward(self, input: Tensor) -> Tensor:
                return 2 * super().forward(input)

        model = Tiny()
        model.stage2[0].spatial = Doubled(12, 12, 3, 2, 1)
        with pytest.raises(TypeError, match=r"stage2\.0\.spatial.*Doubled"):
            mb.convert(model)

    @pytest.mark.parametrize(("given", "missing"), [({"focal": 60.0}, "depth"), ({"depth": scene()[1]}, "focal")])
    def test_a_call_without_depth_or_focal(self, given: dict[str, Any], missing: str) -> None:
        with pytest.raises(ValueError, match=f"{missing} is missing"):
            mb.convert(Tiny())(scene()[0], **given)

    @pytest.mark.parametrize("kind", ["weight", "bias"])
    def test_parameters_that_two_convolutions_share(self, kind: str) -> None:
        model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
        setattr(model[1], kind, getattr(model[0], kind))
        with pytest.raises(ValueError, match=f"cannot convert 0: it shares its {kind} with 1"):
            mb.convert(model, where="all")

    def test_compiled_depth_at_another_resolution(self) -> None:
        rgb, depth = scene()
        compiled = torch.compile(mb.convert(Tiny()), backend="eager")
        with pytest.raises(ValueError, match="depth must have the resolution of the image"):
            compiled(rgb, depth=depth[..., ::2, ::2], focal=60.0)

    def test_depth_at_another_resolution(self) -> None:
        rgb, depth = scene()
        with pytest.raises(ValueError, match=r"resolution of the image, \(64, 64\), got \(32, 32\)"):
            mb.convert(Tiny())(rgb, depth=depth[..., ::2, ::2], focal=60.0)


class TestModelsThemselves:
    def test_the_given_model_is_left_alone(self) -> None:
        model = Tiny().train()
        before = copy.deepcopy(model.state_dict())
        net = mb.convert(model)
        nn.init.zeros_(net.model.stem.weight)
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert model.training
        assert net.training
        assert not mb.convert(model.eval()).training

    def test_a_checkpoint_of_the_original_network_loads_into_every_kernel(self) -> None:
        source, net = Tiny(), mb.convert(Tiny())
        net.load_original(source.state_dict())
        rgb, depth = scene()
        assert relative_error(net(rgb, depth=torch.ones_like(depth), focal=60.0), source(rgb)) < 1e-5
        assert torch.equal(net.model.stage1[0].spatial.weight, source.stage1[0].spatial.weight.repeat(3, 1, 1, 1))
        assert net.original_state().keys() == source.state_dict().keys()
        with pytest.raises(RuntimeError, match=r"Missing key.*stem\.weight"):
            net.load_original({k: v for k, v in source.state_dict().items() if k != "stem.weight"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: timm.create_model("resnet18", num_classes=10),
        lambda: torchvision.models.mobilenet_v3_small(num_classes=10),
        lambda: smp.Unet("resnet18", encoder_weights=None, classes=5),
    ],
    ids=["timm", "torchvision", "smp"],
)
class TestRealNetworksInCompilers:
    @pytest.fixture
    def net(self, make: Callable[[], nn.Module]) -> Converted:
        torch.manual_seed(0)
        return mb.convert(lively(make()))

    @torch.no_grad()
    def test_compile(self, net: Converted) -> None:
        rgb, depth = scene()
        compiled = torch.compile(net, fullgraph=True)
        assert relative_error(compiled(rgb, depth=depth, focal=60.0), net(rgb, depth=depth, focal=60.0)) < 1e-4

    @torch.no_grad()
    def test_onnx(self, net: Converted, tmp_path: Path) -> None:
        import onnxruntime

        rgb, depth = scene()
        focal = torch.tensor([60.0, 70.0])
        kwargs = {"depth": depth, "focal": focal}
        program = torch.onnx.export(net, (rgb,), kwargs=kwargs, dynamo=True, verbose=False, optimize=False)
        program.save(tmp_path / "net.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
        rgb, depth = scene(seed=1)
        inputs = {entry.name: t.numpy() for entry, t in zip(session.get_inputs(), (rgb, depth, focal), strict=True)}
        (actual,) = session.run(None, inputs)
        assert relative_error(torch.from_numpy(actual), net(rgb, depth=depth, focal=focal)) < 1e-4
