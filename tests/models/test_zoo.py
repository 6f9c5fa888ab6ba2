"""A sample of the networks of benchmarks/zoo.py, with one of each kind that is hard to place."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torchvision.models import vgg

import malleable as mb
from helpers.networks import Tiny, lively, relative_error, scene


def of_timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        if not timm.is_model(name):
            pytest.skip(f"timm {timm.__version__} has no {name}")
        return timm.create_model(name, num_classes=10)

    return make


def of_smp(architecture: str, encoder: str) -> Callable[[], nn.Module]:
    return lambda: getattr(smp, architecture)(encoder, encoder_weights=None, classes=5)


def of_transformers(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        kind = getattr(pytest.importorskip("transformers"), name)
        model: nn.Module = kind(kind.config_class())
        return model

    return make


def yolo() -> nn.Module:
    pytest.importorskip("ultralytics")
    model: nn.Module = importlib.import_module("ultralytics.nn.tasks").DetectionModel("yolov8n.yaml", verbose=False)
    return model


def numbered(pattern: str, *numbers: Any) -> list[str]:
    return [pattern.format(n) for n in numbers]


ZOO: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    # whose stem alone was replaced
    "repvgg": (of_timm("repvgg_a0"), numbered("stages.{}.0.conv_kxk.conv", 0, 1, 2, 3)),
    "mobileone": (of_timm("mobileone_s0"), numbered("stages.{}.0.conv_kxk.0.conv", 0, 1, 2, 3)),
    "fastvit": (
        of_timm("fastvit_t8"),
        numbered("stages.{}.blocks.0.token_mixer.mixer.conv_kxk.0.conv", 0, 1, 2, 3),
    ),
    "efficientvit": (of_timm("efficientvit_b0"), numbered("stages.{}.blocks.0.main.depth_conv.conv", 0, 1, 2, 3)),
    # which missed stages
    "hrnet": (
        of_timm("hrnet_w18_small"),
        numbered("stage{0[0]}.0.branches.{0[1]}.0.conv1", (2, 0), (2, 1), (3, 2), (4, 3)),
    ),
    "lowformer": (
        of_timm("lowformer_b0"),
        numbered("stages.{}.0.main.spatial_conv.conv", 0, 1) + numbered("stages.{}.1.attn.main.1.conv_proj.conv", 2, 3),
    ),
    "efficientvim": (of_timm("efficientvim_m1"), numbered("stages.{}.blocks.0.dwconv1.conv", 0, 1, 2)),
    "cpubone": (
        of_timm("cpubone_nano"),
        numbered("stages.{}.0.main.spatial_conv.conv", 0, 1)
        + numbered("stages.{}.1.total.1.main.spatial_conv.conv.1", 2, 3),
    ),
    "mobilevit": (
        of_transformers("MobileViTModel"),
        [
            "encoder.layer.1.layer.0.conv_3x3.convolution",
            *numbered("encoder.layer.{}.downsampling_layer.conv_3x3.convolution", 2, 3, 4),
        ],
    ),
    # whose decoder or neck was replaced
    "manet": (of_smp("MAnet", "mit_b0"), numbered("encoder.block{}.0.mlp.dwconv.dwconv", 1, 2, 3, 4)),
    "pan": (of_smp("PAN", "mit_b0"), numbered("encoder.block{}.0.mlp.dwconv.dwconv", 1, 2, 3, 4)),
    "unet with a center": (of_smp("Unet", "vgg11_bn"), numbered("encoder.features.{}", 4, 8, 15, 22)),
    "yolo": (yolo, numbered("model.{}.m.0.cv1.conv", 2, 4, 6, 8)),
    # which had far too many
    "repghost": (
        of_timm("repghostnet_050"),
        ["blocks.0.0.ghost1.cheap_operation.0", *numbered("blocks.{}.0.conv_dw", 1, 3, 5, 7)],
    ),
    "rexnet": (of_timm("rexnet_100"), numbered("features.{}.conv_dw.conv", 0, 1, 3, 5, 11)),
    # in which nothing was found
    "pvt": (of_timm("pvt_v2_b0"), numbered("stages.{}.blocks.0.mlp.dwconv", 0, 1, 2, 3)),
    "segformer": (of_transformers("SegformerModel"), numbered("stages.{}.blocks.0.mlp.dwconv.dwconv", 0, 1, 2, 3)),
    "densenet": (of_timm("densenet121"), numbered("features.denseblock{}.denselayer1.conv2", 1, 2, 3, 4)),
    "dpn": (of_timm("dpn48b"), numbered("features.conv{}_1.c3x3_b.conv", 2, 3, 4, 5)),
    "vovnet": (of_timm("ese_vovnet19b_slim_dw"), numbered("stages.{}.blocks.0.conv_mid.0.conv_dw", 0, 1, 2, 3)),
    "vgg": (lambda: vgg.make_layers(vgg.cfgs["A"]), ["3", "6", "11", "16"]),
    "googlenet": (
        lambda: torchvision.models.googlenet(init_weights=False, aux_logits=False),
        numbered("inception{}a.branch2.1.conv", 3, 4, 5),
    ),
    "shufflenet": (torchvision.models.shufflenet_v2_x0_5, numbered("stage{}.0.branch1.0", 2, 3, 4)),
    "mobilenetv1": (of_timm("mobilenetv1_100"), numbered("blocks.{}.0.conv_dw", 0, 1, 2, 3, 4)),
    "lcnet": (of_timm("lcnet_035"), numbered("blocks.{}.0.conv_dw", 0, 1, 2, 3, 5)),
    # whose convolutions pad as TensorFlow does, themselves or outside
    "conv2d_same": (of_timm("tf_mobilenetv3_small_minimal_100"), numbered("blocks.{}.0.conv_dw", 0, 1, 2, 3, 4)),
    "static_same": (
        of_smp("Unet", "efficientnet-b0"),
        numbered("encoder._blocks.{}._depthwise_conv", 0, 1, 3, 5, 8, 11, 15),
    ),
    "padded_outside": (
        of_transformers("MobileNetV2Model"),
        numbered("layer.{}.conv_3x3.convolution", 0, 2, 5, 9, 12, 15),
    ),
    # whose convolutions standardise their weights
    "nfnet": (of_timm("test_nfnet"), numbered("stages.{}.0.conv2", 0, 1, 2, 3)),
    "bit": (of_transformers("BitModel"), numbered("encoder.stages.{}.layers.0.conv2", 0, 1, 2, 3)),
    # which take images of their own size only
    "efficientvit_msra": (of_timm("efficientvit_m0"), numbered("stages.{}.blocks.0.dw0.m.conv", 0, 1, 2)),
    "gcvit": (
        of_timm("gcvit_xxtiny"),
        ["stages.0.global_block.blocks.conv1.conv_dw", *numbered("stages.{}.downsample.reduction", 1, 2, 3)],
    ),
    "bat": (of_timm("bat_resnext26ts"), numbered("stages.{}.0.conv2_kxk.conv", 0, 1, 2, 3)),
}
SIZES = {"pan": 128, "efficientvit_msra": 224, "gcvit": 224, "bat": 256}


@pytest.mark.parametrize("kind", ZOO)
def test_is_converted_exactly_and_in_the_right_places(kind: str) -> None:
    make, expected = ZOO[kind]
    torch.manual_seed(0)
    model = lively(make())
    net = mb.convert(model)
    assert list(net.layers()) == expected
    assert not net.missed
    size = SIZES.get(kind, 64)
    rgb, depth = scene(1, size, size)
    with torch.inference_mode():
        actual, original = (floats(output) for output in (net(rgb, depth=depth * 0, focal=60.0), model(rgb)))
    assert all(relative_error(a, o) < 1e-4 for a, o in zip(actual, original, strict=True))


def test_a_detector_returns_its_boxes_as_before() -> None:
    torch.manual_seed(0)
    make = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    model = make(weights=None, weights_backbone=None, num_classes=5, min_size=96, max_size=128).eval()
    net = mb.convert(model)
    assert all(name.startswith("backbone.body.") for name in net.layers())
    rgb, depth = scene(2, 96, 128)
    with torch.inference_mode():
        expected, found = model(list(rgb)), net(list(rgb), depth=depth * 0, focal=60.0)
    assert [set(image) for image in found] == [{"boxes", "labels", "scores"}] * 2
    for a, e in zip(floats(found), floats(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3)


def floats(output: Any) -> list[Tensor]:
    output = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "offered"),
        [
            (of_smp("DPT", "tu-vit_tiny_patch16_224"), r"'decoder\.reassemble_blocks\.1\.project_to_feature_dim'"),
            (of_timm("levit_128s"), r"'stem\.conv3\.linear' \(rate 4\)"),
        ],
        ids=["only a decoder", "only a stem"],
    )
    def test_name_what_could_be_replaced(self, make: Callable[[], nn.Module], offered: str) -> None:
        with pytest.raises(ValueError, match=rf"none begins a stage on the way down.*{offered}"):
            mb.convert(make())

    def test_name_the_few_places_there_are(self) -> None:
        with pytest.raises(ValueError, match=r"finds only stage1\.0\.mlp\.conv2 .* at rate 16, 32; pass where=\["):
            mb.convert(timm.create_model("visformer_tiny"))


class TestMissedRates:
    """A stage of attention has nothing to replace."""

    class Attentive(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.stage3 = nn.Sequential(nn.AvgPool2d(4), Mix())

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.stage3(super().forward(x))
            return result

    def test_are_warned_of_and_in_the_summary(self) -> None:
        with pytest.warns(UserWarning, match=r"no k × k convolution to replace at rate 16: depth is seen at stage1\.0"):
            net = mb.convert(self.Attentive())
        assert net.missed == (16,)
        assert str(mb.summary(net)).splitlines()[-1] == "no convolution to replace at rate 16"


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(12, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


class Padded(nn.Module):
    """Puts TensorFlow's padding around the map before a plain convolution of stride 2 reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.first, self.second):
            right, bottom = (2 if n % 2 else 1 for n in (x.shape[-1], x.shape[-2]))
            x = conv(F.pad(x, (right // 2, right - right // 2, bottom // 2, bottom - bottom // 2)))
        return x


def test_coarse_maps_that_are_rounded_down_keep_their_rate() -> None:
    """ConvNeXt cuts off what does not fill a patch: 240 × 320 become 7 × 10 at rate 32."""
    net = mb.convert(timm.create_model("convnext_atto", pretrained=False, depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)))
    found: dict[str, float] = {}
    for placed, layer in zip(net.placed, net.layers().values(), strict=True):

        def note(layer: nn.Module, args: tuple[Tensor, mb.Geometry], name: str = placed.name) -> None:
            found[name] = float(args[1].depth_at(args[0].shape[-2:])[1])

        layer.register_forward_pre_hook(note)
    net(torch.rand(1, 3, 240, 320), depth=1 + torch.rand(1, 1, 240, 320), focal=260.0)
    assert found == {placed.name: placed.rate for placed in net.placed}
    assert max(found.values()) == 32


class TestPadding:
    def test_outside_changes_neither_rate_nor_place(self) -> None:
        net = mb.convert(Padded(), where="all")
        assert [layer.rate for layer in net.placed] == [1, 2]

    @pytest.mark.parametrize("size", [64, 63, 50])
    def test_outside_is_what_a_convolution_that_pads_itself_sees(self, size: int) -> None:
        """Taps in the padding are outside of the image, and depth is not shifted by them."""
        padded = Padded()
        same = timm.layers.Conv2dSame(3, 4, 3, 2)
        same.load_state_dict(padded.first.state_dict())
        outside, itself = mb.convert(padded, where=["first"]), mb.convert(same, where="all")
        rgb, depth = scene(1, size, size)
        geometry = mb.Geometry(depth, 60.0)
        right = 2 if size % 2 else 1
        x = F.pad(rgb, (right // 2, right - right // 2) * 2)
        expected = itself(rgb, depth=depth, focal=60.0)
        assert relative_error(outside.layers()["first"](x, geometry), expected) < 1e-5
        assert relative_error(expected, same(rgb)) > 1e-3

    @pytest.mark.parametrize("pads", [(1, 0, 1, 0), (0, 2, 0, 2), (2, 1, 0, 1)])
    @pytest.mark.parametrize("size", [64, 63])
    def test_outside_that_is_uneven(self, pads: tuple[int, int, int, int], size: int) -> None:
        class Itself(nn.Conv2d):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(F.pad(input, pads))

        conv = Itself(4, 4, 3)
        outside = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ZeroPad2d(pads), nn.Conv2d(4, 4, 3))
        outside[2].load_state_dict(conv.state_dict())
        rgb, depth = scene(1, size, size)
        itself = mb.convert(nn.Sequential(outside[0], conv), where=["1"])(rgb, depth=depth, focal=60.0)
        actual = mb.convert(outside, where=["2"])(rgb, depth=depth, focal=60.0)
        assert relative_error(actual, itself) < 1e-5

    def test_outside_first_of_columns_and_then_of_rows(self) -> None:
        rgb, depth = scene(1, 64, 64)
        once = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ZeroPad2d((2, 1, 0, 1)), nn.Conv2d(4, 4, 3))
        twice = nn.Sequential(
            once[0], nn.Sequential(nn.ConstantPad1d((2, 1), 0.0), nn.ZeroPad2d((0, 0, 0, 1))), once[2]
        )
        expected = mb.convert(once, where=["2"])(rgb, depth=depth, focal=60.0)
        assert relative_error(mb.convert(twice, where=["2"])(rgb, depth=depth, focal=60.0), expected) < 1e-5

    def test_outside_at_no_whole_rate_is_said(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 7, 2), nn.Conv2d(4, 4, 7, 2), nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3))
        with pytest.warns(UserWarning, match="pads a map of .* pixels before 3, at no whole rate"):
            mb.convert(model, where=["3"])

    @pytest.mark.parametrize(("pad", "mode"), [
        (nn.ReflectionPad2d(1), "reflect"), (nn.ReplicationPad2d(1), "replicate"),
        (nn.ConstantPad2d(1, 0.5), "constant"),
    ])  # fmt: skip
    def test_outside_with_other_than_zeros_is_refused(self, pad: nn.Module, mode: str) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), pad, nn.Conv2d(4, 4, 3))
        with pytest.raises(ValueError, match=f"cannot convert 2: the network pads its input in mode '{mode}'"):
            mb.convert(model, where="all")
        assert mb.convert(model, where=["0"]).placed[0].rate == 1

    @pytest.mark.skipif(not timm.is_model("cpubone_nano"), reason="timm is older than it")
    def test_outside_in_a_backbone(self) -> None:
        net = mb.deeplabv3plus("cpubone_nano", pretrained=False, output_stride=32)
        assert [layer.padded_at for layer in net.backbone.layers().values()] == [None, None, 16, 32]

    @pytest.mark.parametrize("size", [(64, 64), (63, 50)])
    def test_of_a_strided_convolution_that_pads_itself(self, size: tuple[int, int]) -> None:
        conv = timm.layers.Conv2dSame(3, 4, 5, 2)
        net = mb.convert(conv, where="all")
        rgb, depth = scene(1, *size)
        assert relative_error(net(rgb, depth=torch.ones_like(depth), focal=60.0), conv(rgb)) < 1e-5

    def test_that_follows_no_known_rule_is_refused(self) -> None:
        class Odd(nn.Conv2d):
            def forward(self, input: Tensor) -> Tensor:
                return super().forward(F.pad(input, (input.shape[-1] % 3, 0, 0, 0)))

        with pytest.raises(TypeError, match="Odd"):
            mb.convert(nn.Sequential(Odd(3, 4, 3, 2)), where="all")
