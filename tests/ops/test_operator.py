"""The operator as PyTorch sees it: registration, gradients, cost, memory, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from malleable.functional import depth_conv2d
from malleable.ops.operator import operator, operator_backward


def problem(
    kernels: int = 3, groups: int = 1, stride: int = 1, dtype: torch.dtype = torch.float64, channels_last: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, assign and bias of a 3×3 layer with padding 1, all requiring gradients."""
    x = torch.randn(2, 4, 6, 7, dtype=dtype)
    weight = torch.randn(kernels * 6, 4 // groups, 3, 3, dtype=dtype)
    if channels_last:
        x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
    size = [(n - 1) // stride + 1 for n in (6, 7)]
    assign = torch.rand(2, kernels, 9, *size, dtype=dtype)
    leaves = (x, weight, assign, torch.randn(6, dtype=dtype))
    return tuple(t.requires_grad_() for t in leaves)  # type: ignore[return-value]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(groups: int, stride: int, channels_last: bool) -> None:
    x, weight, assign, bias = problem(groups=groups, stride=stride, channels_last=channels_last)
    settings = ([stride, stride], [1, 1, 1, 1], [1, 1], groups, "auto")
    torch.library.opcheck(operator, (x, weight, assign, bias, *settings))
    torch.library.opcheck(operator, (x, weight, assign.detach(), None, *settings))


@pytest.mark.parametrize("needs", [[True, True, True], [False, True, False], [True, False, True]])
def test_opcheck_backward(needs: list[bool]) -> None:
    x, weight, assign, _ = (t.detach() for t in problem())
    grad = torch.randn(2, 6, 6, 7, dtype=torch.float64)
    torch.library.opcheck(operator_backward, (grad, x, weight, assign, [1, 1], [1, 1, 1, 1], [1, 1], 1, "auto", needs))


def test_gradcheck_of_every_input() -> None:
    leaves = problem(kernels=2, groups=2, stride=2)
    assert torch.autograd.gradcheck(
        lambda x, weight, assign, bias: depth_conv2d(x, weight, assign, bias, 2, 1, 1, 2), leaves
    )


@pytest.mark.parametrize("subset", [(0,), (1,), (2,), (3,), (0, 2)])
def test_only_the_gradients_asked_for(subset: tuple[int, ...]) -> None:
    leaves = problem()
    everything = torch.autograd.grad(depth_conv2d(*leaves, padding=1).square().sum(), leaves)
    some = [leaf.detach().requires_grad_(i in subset) for i, leaf in enumerate(leaves)]
    depth_conv2d(*some, padding=1).square().sum().backward()
    for i, (leaf, expected) in enumerate(zip(some, everything, strict=True)):
        if i in subset:
            torch.testing.assert_close(leaf.grad, expected)
        else:
            assert leaf.grad is None


def test_backward_keeps_its_inputs_and_nothing_else() -> None:
    x, weight, assign, bias = problem()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        depth_conv2d(x, weight, assign, bias, padding=1)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (x, weight, assign)}


@pytest.mark.parametrize("groups", [1, 2])
def test_flops_are_a_convolutions_with_k_times_the_channels(groups: int) -> None:
    x, weight, assign, bias = problem(kernels=3, groups=groups, dtype=torch.float32)
    conv = nn.Conv2d(12, 6, 3, padding=1, groups=groups)
    with FlopCounterMode(display=False) as ours:
        y = depth_conv2d(x, weight, assign, bias, padding=1, groups=groups)
        forward = ours.get_total_flops()
        y.sum().backward()
    with FlopCounterMode(display=False) as theirs:
        conv(torch.randn(2, 12, 6, 7))
    assert forward == theirs.get_total_flops()
    assert ours.get_total_flops() == 3 * forward  # one pass for x and assign together, one for the weights


def test_the_output_is_channels_last_when_a_convolutions_would_be() -> None:
    x, weight, assign, bias = problem(channels_last=True)
    assert depth_conv2d(x, weight, assign, bias, padding=1).is_contiguous(memory_format=torch.channels_last)
    assert depth_conv2d(x.contiguous(), weight, assign, padding=1).is_contiguous(memory_format=torch.channels_last)
    assert depth_conv2d(x.contiguous(), weight.contiguous(), assign, padding=1).is_contiguous()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(4, 6, 7)}, ValueError, "x must be"),
        ({"x": torch.ones(2, 5, 6, 7)}, ValueError, "x must have 4 channels, got 5"),
        ({"x": torch.ones(2, 4, 6, 7, dtype=torch.int64)}, TypeError, "floating point"),
        ({"assign": torch.ones(2, 3, 9, 5, 7)}, ValueError, "assign must have shape"),
        ({"assign": torch.ones(2, 4, 9, 6, 7)}, ValueError, "18 rows"),
        ({"assign": torch.ones(2, 9, 6, 7)}, ValueError, "assign"),
        ({"bias": torch.ones(18)}, ValueError, "bias must have shape \\(6,\\)"),
        ({"weight": torch.ones(18, 4, 3, 3, dtype=torch.float64)}, TypeError, "weight is torch.float64"),
        ({"engine": "fastest"}, ValueError, "engine must be 'auto' or one of"),
    ],
)
def test_wrong_calls_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x, weight, assign, bias = problem(dtype=torch.float32)
    call: dict[str, Any] = {"x": x, "weight": weight, "assign": assign, "bias": bias, "padding": 1, **change}
    with pytest.raises(error, match=message):
        depth_conv2d(**call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 4, 6, 7)}, r"assign must have shape .* = \(3, 3, 9, 6, 7\)"),
        ({"x": torch.ones(2, 5, 6, 7)}, "x must have 4 channels, got 5"),
        ({"bias": torch.ones(18)}, r"bias must have shape \(6,\)"),
    ],
)
def test_compilers_that_skip_the_checks_meet_them_in_the_operator(change: dict[str, Any], message: str) -> None:
    x, weight, assign, bias = problem(dtype=torch.float32)
    call: dict[str, Any] = {"x": x, "weight": weight, "assign": assign, "bias": bias, **change}
    with pytest.raises(ValueError, match=message):
        torch.ops.malleable.depth_conv2d(
            **call, stride=[1, 1], padding=[1, 1, 1, 1], dilation=[1, 1], groups=1, engine="auto"
        )
