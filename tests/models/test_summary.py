from __future__ import annotations

import malleable as mb
from helpers.networks import Tiny
from malleable.models.summary import Replaced


def test_lists_name_kind_rate_kernels_and_parameters() -> None:
    net = mb.convert(Tiny(), kernels=2)
    assert mb.summary(net).layers == (
        Replaced("model.stage1.0.spatial", "malleable", 2, 2, 2 * 8 * 8 * 9 + 8 + 7, 8 * 8 * 9 + 7),
        Replaced("model.stage2.0.spatial", "malleable", 2, 2, 2 * 12 * 12 * 9 + 12 + 7, 12 * 12 * 9 + 7),
    )


def test_parameters_added_are_those_of_the_network() -> None:
    model = Tiny()
    for conv in ("malleable", "conv25d", "depth_aware"):
        net = mb.convert(model, conv, where="all")
        before, after = (sum(p.numel() for p in n.parameters()) for n in (model, net))
        assert sum(layer.added for layer in mb.summary(net).layers) == after - before


def test_prints_a_table() -> None:
    text = str(mb.summary(mb.convert(Tiny(), "conv25d")))
    header, first, *_, total = text.splitlines()
    assert header.split() == ["layer", "convolution", "rate", "kernels", "parameters", "added"]
    assert first.split() == ["model.stage1.0.spatial", "conv25d", "2", "3", "1,736", "1,152"]
    assert total.startswith("2 layers")


def test_a_rate_that_is_not_known_and_a_network_without_depth() -> None:
    layer = mb.Conv25d(3, 4, 3)
    assert mb.summary(layer).layers[0].rate is None
    assert "?" in str(mb.summary(layer))
    assert mb.summary(Tiny()).layers == ()
