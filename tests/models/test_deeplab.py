"""DeepLabv3+ on several backbones: one tester class, a subclass a family."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

import malleable as mb
from helpers.networks import lively, relative_error, scene
from malleable.models import DeepLabV3Plus
from malleable.models.merge import Merge

SHARED = Path(__file__).resolve().parents[3] / "shared"


def build(backbone: str = "test_resnet", num_classes: int = 5, **options: Any) -> DeepLabV3Plus:
    torch.manual_seed(0)
    return lively(mb.deeplabv3plus(backbone, num_classes, pretrained=False, **options))


class DeepLabTester:
    backbone: ClassVar[str]
    output_stride: ClassVar[int] = 16
    expected: ClassVar[dict[str, float]]  # convolution → rate of its input

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls) -> DeepLabV3Plus:
        return build(cls.backbone, output_stride=cls.output_stride)

    def test_one_convolution_a_stage_sees_depth(self, net: DeepLabV3Plus) -> None:
        assert {placed.name: placed.rate for placed in net.backbone.placed} == self.expected

    @pytest.mark.parametrize("size", [(64, 64), (65, 97), (50, 33)])
    @torch.inference_mode()
    def test_logits_have_the_size_of_the_image(self, net: DeepLabV3Plus, size: tuple[int, int]) -> None:
        rgb, depth = scene(1, *size)
        assert net(rgb, depth=depth, focal=60.0).shape == (1, 5, *size)

    @torch.inference_mode()
    def test_on_flat_depth_it_is_the_baseline(self, net: DeepLabV3Plus) -> None:
        baseline = DeepLabV3Plus(self.backbone, 5, None, output_stride=self.output_stride).eval()
        baseline.backbone.load_original(net.backbone.original_state())
        head = {key: value for key, value in net.state_dict().items() if not key.startswith("backbone.")}
        baseline.load_state_dict(head, strict=False)
        rgb, depth = scene()
        expected = baseline(rgb, depth=depth, focal=60.0)
        assert torch.equal(expected, baseline(rgb))
        assert relative_error(net(rgb, depth=torch.ones_like(depth), focal=60.0), expected) < 1e-5
        assert relative_error(net(rgb, depth=depth, focal=60.0), expected) > 1e-4


class TestResNet(DeepLabTester):
    backbone = "resnet18"
    expected: ClassVar = {"layer1.0.conv1": 4, "layer2.0.conv1": 4, "layer3.0.conv1": 8, "layer4.0.conv1": 16}


class TestBottleneckResNetAtStride8(DeepLabTester):
    backbone = "resnet26t"
    output_stride = 8
    expected: ClassVar = {"layer1.0.conv2": 4, "layer2.0.conv2": 4, "layer3.0.conv2": 8, "layer4.0.conv2": 8}


class TestConvNeXt(DeepLabTester):
    backbone = "convnext_atto"
    output_stride = 32
    expected: ClassVar = {f"stages_{n}.blocks.0.conv_dw": 4 * 2**n for n in range(4)}


class TestEfficientNet(DeepLabTester):
    """Its seven groups of blocks make four stages; the first group, at rate 2, belongs to none."""

    backbone = "efficientnet_b0"
    expected: ClassVar = {f"blocks.{n}.0.conv_dw": r for n, r in zip((1, 2, 3, 5), (2, 4, 8, 16), strict=True)}


class TestStructure:
    def test_aspp_rates_double_at_stride_8(self) -> None:
        for stride, rates in ((8, [12, 24, 36]), (16, [6, 12, 18]), (32, [6, 12, 18])):
            net = build(output_stride=stride)
            convolutions = [m for m in net.aspp.modules() if isinstance(m, nn.Conv2d) and max(m.kernel_size) > 1]
            assert [m.dilation[0] for m in convolutions] == rates

    @pytest.mark.parametrize("stages", [(2, 3), (4, 5), (3, 4, 5)])
    def test_stages(self, stages: tuple[int, ...]) -> None:
        net = build("resnet18", stages=stages)
        assert [(placed.name, placed.stage) for placed in net.backbone.placed] == [
            (f"layer{stage - 1}.0.conv1", f"res{stage}") for stage in stages
        ]

    def test_merging_block_merges_every_stage(self) -> None:
        net = build(merge=True)
        rgb, depth = scene(1, 65, 97)
        stages = [stage.detach().requires_grad_() for stage in net.backbone(rgb, depth=depth, focal=60.0)[-4:]]
        merged = net.merge(stages)
        assert merged.shape[-2:] == stages[0].shape[-2:]
        merged.sum().backward()
        assert all(stage.grad is not None and stage.grad.abs().sum() > 0 for stage in stages)
        assert net(rgb, depth=depth, focal=60.0).shape == (1, 5, 65, 97)
        assert net.skip is None

    def test_merging_block_of_one_stage_refines_it(self) -> None:
        assert Merge([7], 4).eval()([torch.rand(1, 7, 5, 6)]).shape == (1, 4, 5, 6)

    def test_options_reach_the_layers(self) -> None:
        net = build(kernels=1, temperature=2.0, learnable=("centers",))
        layers = net.backbone.layers().values()
        assert {(layer.kernels, float(layer.temperature), layer.rebalance.requires_grad) for layer in layers} == {
            (1, 2.0, False)
        }

    def test_a_training_step_moves_every_parameter(self) -> None:
        net = build(merge=True).train()
        rgb, depth = scene()
        net(rgb, depth=depth, focal=60.0).square().mean().backward()
        assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


class TestReleased:
    @pytest.fixture(scope="class")
    @classmethod
    def net(cls) -> DeepLabV3Plus:
        return build("resnet50s", merge="released", width=8, channels=(8, 16, 24, 32), invalid="uniform")

    def test_the_units_of_res5_are_dilated_by_2_4_and_8(self, net: DeepLabV3Plus) -> None:
        convolutions = [unit.conv2 for unit in net.backbone.model.layer4]
        assert [layer.dilation for layer in convolutions] == [(2, 2), (4, 4), (8, 8)]
        assert net.backbone.placed[-1].rate == 16

    @torch.inference_mode()
    def test_all_stages_meet_at_an_eighth_and_the_classifier_sees_a_half(self, net: DeepLabV3Plus) -> None:
        rgb, depth = scene(1, 64, 96)
        stages = net.backbone(rgb, depth=depth, focal=60.0)[-4:]
        merged = net.merge(stages)
        assert merged.shape == (1, 16, 8, 12)
        assert net.decoder(net.aspp(merged)).shape == (1, 4, 32, 48)

    @torch.inference_mode()
    def test_the_auxiliary_logits_come_when_asked_for(self, net: DeepLabV3Plus) -> None:
        rgb, depth = scene(1, 65, 97)
        logits, early = net(rgb, depth=depth, focal=60.0, auxiliary=True)
        assert logits.shape == early.shape == (1, 5, 65, 97)
        assert torch.equal(net(rgb, depth=depth, focal=60.0), logits)

    def test_a_training_step_moves_every_parameter(self, net: DeepLabV3Plus) -> None:
        net.train()
        rgb, depth = scene()
        sum(out.square().mean() for out in net(rgb, depth=depth, focal=60.0, auxiliary=True)).backward()
        net.eval()
        assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []

    def test_a_folder_round_trip(self, net: DeepLabV3Plus, tmp_path: Path) -> None:
        net.save_pretrained(tmp_path / "net")
        again = DeepLabV3Plus.from_pretrained(tmp_path / "net")
        rgb, depth = scene()
        with torch.inference_mode():
            assert torch.equal(again(rgb, depth=depth, focal=60.0), net(rgb, depth=depth, focal=60.0))

    def test_what_it_is_not_made_for_is_refused(self) -> None:
        for message, options in {
            "merge must be False, True or 'released', got 'paper'": {"merge": "paper"},
            "merge='released' needs output_stride=16, got 8": {"merge": "released", "output_stride": 8},
            "needs a ResNet": {"merge": "released", "backbone": "efficientnet_b0"},
            "in res5; stages of one .* must differ": {"backbone": "resnet18", "channels": (8, 8, 8, 8)},
        }.items():
            with pytest.raises(ValueError, match=message):
                build(**options)
        with pytest.raises(ValueError, match="only merge='released' has an auxiliary classifier"):
            build(merge=True)(*scene(), focal=60.0, auxiliary=True)


class TestSaving:
    def test_a_folder_round_trip(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        net = build(kernels=2, stages=(2, 5), merge=True, temperature=2.0, invalid="ignore")
        net.save_pretrained(tmp_path / "net")
        assert {"model.safetensors", "config.json"} <= {file.name for file in (tmp_path / "net").iterdir()}
        config = json.loads((tmp_path / "net" / "config.json").read_text())
        assert config["stages"] == [2, 5]
        assert "pretrained" not in config
        assert config == json.loads(json.dumps(net.settings))
        again = DeepLabV3Plus.from_pretrained(tmp_path / "net")
        assert again.settings == config
        rgb, depth = scene()
        with torch.inference_mode():
            assert torch.equal(again(rgb, depth=depth, focal=60.0), net(rgb, depth=depth, focal=60.0))
        assert capsys.readouterr().out == ""

    def test_weights_that_do_not_fit_are_an_error(self, tmp_path: Path) -> None:
        build(kernels=1).save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "conv": "conv25d"}))
        with pytest.raises(RuntimeError, match=r"centers"):
            DeepLabV3Plus.from_pretrained(tmp_path)


class TestPretrained:
    def check(self, net: DeepLabV3Plus, source: dict[str, torch.Tensor]) -> None:
        state = net.backbone.original_state()
        assert all(torch.equal(value, source[key]) for key, value in state.items() if "tracked" not in key)
        for layer in net.backbone.layers().values():
            first, *others = layer.weight.chunk(layer.kernels)
            assert all(torch.equal(first, other) for other in others)

    @pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"state_dict": state, "epoch": 3}])
    def test_torchvision_names_in_a_torch_file(self, tmp_path: Path, wrap: Any) -> None:
        source = torchvision.models.resnet18().state_dict()
        torch.save(wrap(source), tmp_path / "resnet18.pth")
        self.check(mb.deeplabv3plus("resnet18", 5, pretrained=tmp_path / "resnet18.pth"), source)

    def test_timm_names_in_a_safetensors_file(self, tmp_path: Path) -> None:
        source = timm.create_model("test_convnext").state_dict()
        save_file(source, tmp_path / "convnext.safetensors")
        net = mb.deeplabv3plus("test_convnext", 5, output_stride=32, pretrained=str(tmp_path / "convnext.safetensors"))
        self.check(net, {key.replace("stages.", "stages_").replace("stem.", "stem_"): v for key, v in source.items()})

    def test_the_imagenet_weights(self) -> None:
        file = SHARED / "weights" / "resnet18_imagenet1k.safetensors"
        if not file.exists():
            pytest.skip("the shared weights are not here")
        net = mb.deeplabv3plus("resnet18", 5, conv=None, pretrained=file)
        assert net.backbone.model.bn1.running_mean.abs().sum() > 0

    def test_weights_of_another_backbone(self, tmp_path: Path) -> None:
        torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "weights.pth")
        with pytest.raises(ValueError, match=r"does not fit backbone 'resnet34': layer1\.2\.conv1\.weight is missing"):
            mb.deeplabv3plus("resnet34", 5, pretrained=tmp_path / "weights.pth")

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"pretrained: there is no file .*nothing\.pth"):
            mb.deeplabv3plus("test_resnet", 5, pretrained=tmp_path / "nothing.pth")

    def test_a_file_with_code_in_it_is_not_run(self, tmp_path: Path) -> None:
        torch.save({"layer": nn.Conv2d(1, 1, 1)}, tmp_path / "model.pth")
        with pytest.raises(ValueError, match=r"model\.pth is broken, or holds more than tensors"):
            mb.deeplabv3plus("test_resnet", 5, pretrained=tmp_path / "model.pth")

    def test_files_that_are_broken_or_hold_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "short.safetensors").write_bytes(b"123")
        (tmp_path / "empty.pth").touch()
        (tmp_path / "text.pth").write_text("error 404")
        torch.save([torch.zeros(1)], tmp_path / "list.pth")
        torch.save({1: torch.zeros(1)}, tmp_path / "numbers.pth")
        (tmp_path / "half.pth").write_bytes((tmp_path / "list.pth").read_bytes()[:600])
        for name, message in (
            ("short.safetensors", "broken"),
            ("empty.pth", "broken"),
            ("text.pth", "broken"),
            ("half.pth", "broken"),
            ("list.pth", "got a list"),
            ("numbers.pth", "tensors by name, got a dict"),
        ):
            with pytest.raises(ValueError, match=message):
                mb.deeplabv3plus("test_resnet", 5, pretrained=tmp_path / name)

    @pytest.mark.parametrize(
        ("backbone", "reason"), [("resnet18", "could not be downloaded"), ("test_convnext3", "could not be|has no")]
    )
    def test_without_a_network_one_line_says_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backbone: str, reason: str
    ) -> None:
        import huggingface_hub.constants as hub

        monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
        monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(RuntimeError, match=rf"({reason}).*pass pretrained=.* or pretrained=False") as caught:
            mb.deeplabv3plus(backbone, 5, output_stride=32, pretrained=True)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backbone": "resnet1"}, "backbone must be a timm model.*'resnet1'"),
        ({"backbone": "resnet19"}, r"got 'resnet19', did you mean 'resnet18'\?"),
        ({"backbone": "ResNet-50s"}, r"got 'ResNet-50s', did you mean 'resnet50s'\?"),
        ({"backbone": None}, "backbone must be a timm model.*got None"),
        ({"backbone": "swin_tiny_patch4_window7_224", "output_stride": 32}, "maps with channels last"),
        ({"backbone": "densenet121"}, "'densenet121' does not take output_stride=16"),
        ({"backbone": "efficientvit_m0", "output_stride": 32}, "'efficientvit_m0' gives features at"),
        ({"output_stride": 4}, "output_stride must be 8, 16 or 32, got 4"),
        ({"stages": (1, 2)}, r"stages must be among \(2, 3, 4, 5\), each once, got \(1, 2\)"),
        ({"stages": (2, 2)}, r"stages must be among \(2, 3, 4, 5\), each once, got \(2, 2\)"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"conv": "3d"}, "conv must be None or one of"),
        ({"backbone": "vgg16", "output_stride": 32}, "vgg16 has no k × k, k > 1, convolution to replace in res5"),
        ({"depth_encoder": "log"}, "depth_encoder must be None, 'metric' or 'relative', got 'log'"),
        ({"channels": (8, 8)}, r"channels must be four positive numbers, of res2 … res5, got \(8, 8\)"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"backbone": "convnext_atto", "channels": (8, 16, 32, 64), "output_stride": 32}, "does not take channels="),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_no_weights_are_looked_for_that_could_not_fit() -> None:
    with pytest.raises(ValueError, match=r"no ImageNet weights fit channels=\(8, 16, 32, 64\); say pretrained=False"):
        mb.deeplabv3plus("resnet18", 5, channels=(8, 16, 32, 64), pretrained=True)


def test_a_second_encoder_adds_its_maps_stage_by_stage() -> None:
    net = build(backbone="resnet10t", conv=None, depth_encoder="relative").eval()
    rgb, depth = scene()
    plain = net.backbone(rgb)[-4:]
    added = net.depth_encoder(depth)[-4:]  # type: ignore[misc]
    assert [a.shape for a in added] == [p.shape for p in plain]
    assert torch.equal(net(rgb, depth=depth), net(rgb, depth=4 * depth))
    seen: list[torch.Tensor] = []
    net.aspp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    net(rgb, depth=depth)
    torch.testing.assert_close(seen[0], plain[-1] + added[-1])
    with pytest.raises(ValueError, match="depth is missing"):
        net(rgb)


@pytest.mark.parametrize("other", [(1, 64, 64), (2, 64, 32)])
def test_a_second_encoder_refuses_depth_of_another_batch_or_size(other: tuple[int, int, int]) -> None:
    net = build(conv=None, depth_encoder="relative").eval()
    with pytest.raises(ValueError, match=r"of the image, \(2, 64, 64\), got " + re.escape(str(other))):
        net(scene()[0], depth=scene(*other)[1])


def test_a_second_encoder_has_the_dtype_of_its_network() -> None:
    net = build(backbone="resnet10t", conv=None, depth_encoder="metric").eval().to(torch.bfloat16)
    rgb, depth = scene()
    assert net(rgb.bfloat16(), depth=depth).dtype == torch.bfloat16


def test_a_narrow_network() -> None:
    net = build(backbone="resnet18", channels=(8, 16, 24, 32), width=20, skip=6)
    shapes = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    assert shapes["backbone.model.layer4.1.conv2.weight"] == (32, 32, 3, 3)
    assert shapes["skip.0.weight"] == (6, 8, 1, 1)
    assert shapes["decoder.0.0.weight"] == (20, 26, 3, 3)
    assert shapes["classifier.weight"][1] == 20
    rgb, depth = scene()
    assert net(rgb, depth=depth, focal=60.0).shape[-2:] == (64, 64)


@pytest.mark.slow
def test_onnx_at_sizes_it_was_not_exported_with(tmp_path: Path) -> None:
    import onnxruntime

    net = build()
    rgb, depth = scene(1, 64, 96)
    size = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    program = torch.onnx.export(
        net,
        (rgb,),
        kwargs={"depth": depth, "focal": torch.tensor([60.0])},
        dynamic_shapes={"rgb": size, "depth": size, "focal": None},
        dynamo=True,
        verbose=False,
    )
    program.save(tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    for height, width in ((64, 96), (65, 97)):
        rgb, depth = scene(1, height, width, seed=1)
        inputs = {"rgb": rgb.numpy(), "depth": depth.numpy(), "focal": torch.tensor([50.0]).numpy()}
        (actual,) = session.run(None, inputs)
        with torch.no_grad():
            assert relative_error(torch.from_numpy(actual), net(rgb, depth=depth, focal=50.0)) < 1e-5


@pytest.mark.parametrize(("conv", "kernels"), [("depth_aware", 1), ("conv25d", 3), ("malleable", 3)])
def test_with_one_seed_every_method_starts_from_the_same_weights(conv: str, kernels: int) -> None:
    def weights(conv: str | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return mb.deeplabv3plus("resnet10t", 5, conv, kernels, pretrained=False).state_dict()

    rgb, ours = weights(None), weights(conv)
    for name, weight in rgb.items():
        torch.testing.assert_close(ours[name][: len(weight)] if weight.dim() else ours[name], weight, rtol=0, atol=0)
