"""Networks of other libraries: built by name, adapted to logits at the image's size, never more than that."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.networks import scene
from malleable.layers import DepthConv2d
from malleable.models import DeepLabV3Plus
from malleable.models.convert import Converted, convert
from malleable.models.foreign import Foreign, Unavailable, foreign, from_settings, require_network

FACTORY = """
from torch import nn

def build(num_classes, width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, num_classes, 3, padding=1))
"""
SMALL = {"encoder_name": "resnet18", "decoder_channels": [16, 8, 8, 8, 8]}


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A network of one's own in the current folder."""
    (tmp_path / "own_network.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_network", raising=False)
    return "own_network:build"


@pytest.mark.parametrize(
    ("network", "options"),
    [
        ("smp:Unet", SMALL),
        ("torchvision:lraspp_mobilenet_v3_large", {}),
        ("timm:dla46_c", {"global_pool": ""}),
    ],
)
def test_libraries_give_logits_at_the_size_of_the_image(network: str, options: dict[str, Any]) -> None:
    net = foreign(network, 5, options=options).eval()
    rgb, depth = scene(height=50, width=67)
    with torch.no_grad():
        logits = net(rgb, depth=depth, focal=60.0)
        assert logits.shape == (2, 5, 50, 67)
        assert not torch.equal(logits, net(rgb, depth=torch.zeros_like(depth), focal=60.0))
    assert any(isinstance(module, DepthConv2d) for module in net.modules())


def test_transformers_give_logits_at_the_size_of_the_image() -> None:
    pytest.importorskip("transformers")
    options = {"hidden_sizes": [8, 16, 16, 16], "num_attention_heads": [1, 1, 1, 1], "decoder_hidden_size": 16}
    net = foreign("transformers:SegformerForSemanticSegmentation", 5, where="*.dwconv", options=options).eval()
    rgb, depth = scene(height=50, width=67)
    assert net(rgb, depth=depth, focal=60.0).shape == (2, 5, 50, 67)


def test_padding_for_smp_changes_no_size_that_fits() -> None:
    net = foreign("smp:Unet", 5, options=SMALL).eval()
    rgb, depth = scene(height=64, width=32)
    with torch.no_grad():
        assert torch.equal(net(rgb, depth=depth, focal=60.0), net.converted(rgb, depth=depth, focal=60.0))


@pytest.mark.parametrize("fill_depth", [False, True])
def test_padding_is_unknown_depth_whether_holes_are_filled_or_not(fill_depth: bool) -> None:
    """At 33 × 33 most of the padded map is padding, which must not move the median of the relative channel."""
    converted = convert(nn.Conv2d(3, 3, 3, padding=1), None, depth_input="relative", fill_depth=fill_depth)
    assert converted.depth_input is not None
    nn.init.ones_(converted.depth_input.conv.weight)
    rgb, depth = scene(height=33, width=33)
    expected = converted(rgb, depth=depth)
    actual = Foreign(converted, 32, {"network": "x:y", "num_classes": 3})(rgb, depth=depth)
    torch.testing.assert_close(actual, expected)


def test_depth_of_another_size_is_refused_even_if_both_are_padded_to_one() -> None:
    net = Foreign(convert(nn.Conv2d(3, 3, 3), where="all"), 32, {"network": "x:y", "num_classes": 3})
    with pytest.raises(ValueError, match=r"resolution of the image, \(33, 33\), got \(64, 64\)"):
        net(scene(height=33, width=33)[0], depth=scene(height=64, width=64)[1], focal=60.0)


class Answer(nn.Module):
    """Returns a map of three channels at half size in a wrapping of any kind."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.conv, self.wrap = nn.Conv2d(3, 3, 3, 2, 1), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.conv(x))


def answering(wrap: Any) -> Foreign:
    return Foreign(Converted(Answer(wrap)), 1, {"network": "x:y", "num_classes": 3})


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, lambda x: {"out": x, "aux": x[:, :1]}, lambda x: {"logits": x}, lambda x: SimpleNamespace(logits=x)],
    ids=["tensor", "out", "logits", "attribute"],
)
def test_answers_of_every_kind_are_adapted(wrap: Any) -> None:
    net, (rgb, _) = answering(wrap), scene(height=32, width=48)
    expected = nn.functional.interpolate(net.converted.model.conv(rgb), (32, 48), mode="bilinear")  # type: ignore[operator, union-attr]
    assert torch.equal(net(rgb), expected)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda x: (x, x), "returns a tuple, not logits"),
        (lambda x: {"boxes": x}, "returns a dict of boxes, not logits"),
        (lambda x: x.mean((2, 3)), r"returns \(2, 3\), not logits \(N, 3, height, width\)"),
        (lambda x: x[:, :2], r"returns \(2, 2, 16, 24\), not logits"),
    ],
    ids=["tuple", "detection", "class scores", "another number of classes"],
)
def test_other_answers_are_named(wrap: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        answering(wrap)(scene(height=32, width=48)[0])


class Detector(nn.Module):
    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        assert not self.training, "targets should not be none"
        return [{"boxes": image[0]} for image in images]


def test_a_detector_is_named_before_it_trains() -> None:
    net = Foreign(Converted(Detector()), 1, {"network": "x:y", "num_classes": 3}).train()
    with pytest.raises(ValueError, match="x:y returns a list, not logits"):
        net.require_logits(32, 48)


def test_a_network_that_gives_logits_is_left_as_it_was() -> None:
    net = answering(lambda x: x).train()
    net.converted.model.conv.eval()  # type: ignore[operator, union-attr]  # frozen by its owner
    modes = [module.training for module in net.modules()]
    net.require_logits(32, 48)
    assert [module.training for module in net.modules()] == modes
    assert set(modes) == {True, False}


def test_a_factory_of_one_s_own_is_imported_only_with_trust(factory: str) -> None:
    with pytest.raises(Unavailable, match=r"'own_network:build', and building it runs code .* --trust"):
        foreign(factory, 3)
    assert "own_network" not in sys.modules
    net = foreign(factory, 3, where="all", options={"width": 6}, trust=True)
    assert net.settings["where"] == ["0", "2"]
    assert net(*scene(height=32, width=48), 60.0).shape == (2, 3, 32, 48)


def test_settings_cannot_trust_themselves(factory: str) -> None:
    settings = foreign(factory, 3, where="all", trust=True).settings
    del sys.modules["own_network"]
    for added in ({}, {"trust": True}):
        with pytest.raises((Unavailable, TypeError)):
            from_settings({**settings, **added})
    assert "own_network" not in sys.modules


@pytest.mark.parametrize("conv", ["malleable", None])
def test_settings_make_the_network_again(conv: str | None) -> None:
    net = foreign("smp:Unet", 5, conv, 2, where="encoder.layer[12].0.conv1", depth_input="relative", options=SMALL)
    twin = from_settings(net.settings)
    twin.load_state_dict(net.state_dict())
    assert twin.settings == net.settings
    assert isinstance(from_settings({"backbone": "resnet10t", "conv": None}), DeepLabV3Plus)


def test_weights_of_the_network_before_conversion(factory: str, tmp_path: Path) -> None:
    original = foreign(factory, 3, None, trust=True).converted.model
    save_file(original.state_dict(), tmp_path / "w.safetensors")
    net = foreign(factory, 3, where="all", pretrained=str(tmp_path / "w.safetensors"), trust=True)
    rgb, depth = scene(height=32, width=48)
    blind = net.eval().converted(rgb, depth=torch.zeros_like(depth), focal=60.0)
    torch.testing.assert_close(blind, original.eval()(rgb))
    with pytest.raises(ValueError, match=r"does not fit own_network:build before conversion: .*size mismatch"):
        foreign(factory, 4, where="all", pretrained=str(tmp_path / "w.safetensors"), trust=True)


@pytest.mark.parametrize(
    ("network", "options", "words"),
    [
        ("unet", {}, "must be deeplabv3plus, smp:NAME, torchvision:NAME, timm:NAME, transformers:NAME or package"),
        ("smp:create_model", {}, "segmentation_models_pytorch has Unet, .*got 'create_model'"),
        ("torchvision:resnet18", {}, "torchvision segments with deeplabv3_mobilenet_v3_large.*got 'resnet18'"),
        ("timm:resnett18", {}, "timm model.*did you mean"),
        ("smp:Unet", {"encoder": "x"}, "cannot be built .*encoder.*model.options are its arguments"),
        ("smp:Unet", {"encoder_weights": "imagenet"}, "'encoder_weights': model.pretrained names the weights"),
        ("smp:Unet", {"classes": 4}, "'classes': the data says how many"),
        ("smp:Unet", {"deep": [{"attn_implementation": "a/b"}]}, "'attn_implementation': it could have code fetched"),
        ("smp:Unet", {"_attn_implementation": "a/b"}, "could have code fetched"),
        ("smp:Unet", {"encoder_name": "tu-hf-hub:a/b"}, "encoder_name='tu-hf-hub:a/b', which would be fetched"),
        ("smp:Unet", {"deep": [{"backbone": "a/b"}]}, "backbone='a/b', which would be fetched"),
    ],
)
def test_what_cannot_be_built_is_named(network: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        foreign(network, 3, options=options)
    if "encoder" not in options:  # arguments are checked by the library alone
        with pytest.raises(ValueError, match=words):
            require_network(network, options)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(Unavailable, match="pip install segmentation-models-pytorch"):
        foreign("smp:Unet", 3)


def test_an_option_that_a_factory_does_not_take_is_named(factory: str) -> None:
    with pytest.raises(ValueError, match=r"model.network=\w+:\w+: .*'widht'; model.options go to it by name"):
        foreign(factory, 3, options={"widht": 6}, trust=True)


def test_a_factory_that_is_not_there_is_named(factory: str) -> None:
    with pytest.raises(Unavailable, match="there is no module 'nowhere_at_all'"):
        foreign("nowhere_at_all:build", 3, trust=True)
    with pytest.raises(Unavailable, match=r"there is no module 'timm\.nothing'"):
        foreign("timm.nothing:build", 3, trust=True)
    with pytest.raises(ValueError, match="own_network has no function or class 'make'"):
        foreign("own_network:make", 3, trust=True)
