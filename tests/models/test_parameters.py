from __future__ import annotations

import pytest
import torch
from torch import nn

import malleable as mb
from helpers.networks import Tiny


def names(net: nn.Module, group: dict[str, object]) -> set[str]:
    known = {id(parameter): name for name, parameter in net.named_parameters()}
    return {known[id(parameter)] for parameter in group["params"]}  # type: ignore[attr-defined]


def test_every_parameter_is_in_the_right_group() -> None:
    net = nn.ModuleDict({
        "conv": nn.Conv2d(3, 4, 3),
        "malleable": mb.MalleableConv2d(4, 4, 3),
        "batch": nn.BatchNorm2d(4),
        "layer": nn.LayerNorm([4, 2, 2]),
        "linear": nn.Linear(4, 2),
    })  # fmt: skip
    decay, no_decay, field = mb.parameter_groups(net, lr=0.1, weight_decay=1e-4, receptive_field_lr=5.0)
    assert names(net, decay) == {"conv.weight", "malleable.weight", "linear.weight"}
    assert names(net, no_decay) == {
        "conv.bias", "malleable.bias", "batch.weight", "batch.bias", "layer.weight", "layer.bias", "linear.bias"
    }  # fmt: skip
    assert names(net, field) == {"malleable.centers", "malleable.raw_temperature", "malleable.rebalance"}
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in (decay, no_decay, field)] == [
        ("decay", 0.1, 1e-4), ("no_decay", 0.1, 0.0), ("receptive_field", 0.5, 0.0)
    ]  # fmt: skip


def test_each_trainable_parameter_once() -> None:
    net = mb.convert(Tiny())
    net.model.stage1[1] = net.model.stage1[0]
    net.model.stem.weight.requires_grad_(False)
    groups = mb.parameter_groups(net, lr=0.1, weight_decay=1e-4)
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(parameter) for parameter in net.parameters() if parameter.requires_grad}


def test_an_optimiser_takes_them_and_decays_only_what_it_should() -> None:
    net = mb.MalleableConv2d(2, 2, 3)
    optimizer = torch.optim.SGD(mb.parameter_groups(net, lr=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    changed = {name for name, parameter in net.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"weight"}


def test_groups_without_parameters_are_left_out() -> None:
    groups = mb.parameter_groups(nn.Linear(2, 2, bias=False), lr=0.1, weight_decay=0.0)
    assert [group["name"] for group in groups] == ["decay"]


def test_a_head_has_a_rate_of_its_own() -> None:
    net = nn.ModuleDict(
        {"encoder": nn.Sequential(nn.Conv2d(3, 4, 3), mb.MalleableConv2d(4, 4, 3)), "head": nn.Linear(4, 2)}
    )
    groups = {group["name"]: group for group in mb.parameter_groups(net, lr=0.1, weight_decay=1e-4, head_lr=10.0)}
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "decay": (0.1, 1e-4), "no_decay": (0.1, 0.0), "receptive_field": (0.1, 0.0),
        "head_decay": (1.0, 1e-4), "head_no_decay": (1.0, 0.0),
    }  # fmt: skip
    assert names(net, groups["head_decay"]) == {"head.weight"}
    assert names(net, groups["head_no_decay"]) == {"head.bias"}
    with pytest.raises(ValueError, match="head_lr: Linear has no part called backbone or encoder"):
        mb.parameter_groups(nn.Linear(2, 2), lr=0.1, weight_decay=0.0, head_lr=2.0)
