"""The operator as PyTorch sees it: registration, gradients, cost, memory, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from malleable.functional import depth_conv2d
from malleable.ops.depth_conv2d import operator, operator_backward


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


def test_opcheck_backward_of_a_part_of_a_map() -> None:
    _, weight, assign, _ = (t.detach() for t in problem())
    x = torch.randn(2, 4, 8, 9, dtype=torch.float64)[..., 1:-1, 1:-1]
    grad = torch.randn(2, 6, 6, 7, dtype=torch.float64)
    settings = ([1, 1], [1, 1, 1, 1], [1, 1], 1, "plain", [True, True, True])
    torch.library.opcheck(operator_backward, (grad, x, weight, assign, *settings))


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
        ({"x": torch.ones(4, 6, 7)}, ValueError, r"x must have shape \(N, C, H, W\), got \(4, 6, 7\)"),
        ({"x": torch.ones(2, 5, 6, 7)}, ValueError, "x must have 4 channels, got 5"),
        ({"x": torch.ones(2, 4, 6, 7, dtype=torch.int64)}, TypeError, "floating point"),
        ({"assign": torch.ones(2, 3, 9, 5, 7)}, ValueError, "assign must have shape"),
        ({"assign": torch.ones(2, 4, 9, 6, 7)}, ValueError, "18 rows"),
        ({"assign": torch.ones(2, 9, 6, 7)}, ValueError, r"assign must have shape .*, got \(2, 9, 6, 7\)"),
        ({"weight": torch.ones(18)}, ValueError, r"weight must have shape .*, got \(18,\)"),
        ({"bias": torch.ones(18)}, ValueError, r"bias must have shape \(O,\) = \(6,\)"),
        ({"weight": torch.ones(18, 4, 3, 3, dtype=torch.float64)}, TypeError, "weight is torch.float64"),
        ({"engine": "fastest"}, ValueError, "engine must be 'auto' or one of"),
    ],
)
def test_wrong_calls_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x, weight, assign, bias = problem(dtype=torch.float32)
    call: dict[str, Any] = {"x": x, "weight": weight, "assign": assign, "bias": bias, "padding": 1, **change}
    with pytest.raises(error, match=message):
        depth_conv2d(**call)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"assign": torch.ones(2, 3, 9, 5, 7)}, "assign must have shape"),
        ({"bias": torch.ones(18)}, "bias must have shape"),
        ({"x": torch.ones(2, 5, 6, 7)}, "x must have 4 channels, got 5"),
        ({"engine": "fastest"}, "engine must be 'auto' or one of"),
    ],
)
def test_wrong_calls_without_data_are_refused(change: dict[str, Any], message: str, fake: bool) -> None:
    x, weight, assign, bias = problem(dtype=torch.float32)
    call: dict[str, Any] = {"x": x, "weight": weight, "assign": assign, "bias": bias, "padding": 1, **change}
    mode = FakeTensorMode()
    for name, value in call.items():
        if isinstance(value, Tensor):
            call[name] = mode.from_tensor(value.detach()) if fake else value.detach().to("meta")
    with pytest.raises(ValueError, match=message):
        depth_conv2d(**call)


def raw_call(backward: bool = False) -> dict[str, Any]:
    """Valid arguments of the raw operator: the same layer in float32."""
    x, weight, assign, bias = (t.detach() for t in problem(dtype=torch.float32))
    call: dict[str, Any] = {"x": x, "weight": weight, "assign": assign}
    call |= {"grad": torch.ones(2, 6, 6, 7), "needs": [True] * 3} if backward else {"bias": bias}
    return call | {"stride": [1, 1], "padding": [1, 1, 1, 1], "dilation": [1, 1], "groups": 1, "engine": "auto"}


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.ones(3, 4, 6, 7)}, ValueError, r"assign must have shape .* = \(3, 3, 9, 6, 7\)"),
    ({"x": torch.ones(2, 5, 6, 7)}, ValueError, "x must have 4 channels, got 5"),
    ({"x": torch.ones(4, 6, 7)}, ValueError, r"x must have shape \(N, C, H, W\), got \(4, 6, 7\)"),
    ({"x": torch.ones(2, 0, 6, 7), "weight": torch.ones(18, 0, 3, 3)}, ValueError, "channels of x must be at least 1"),
    ({"x": torch.ones(2, 4, 6, 7).double()}, TypeError, "x is torch.float64 but weight is torch.float32"),
    ({"x": torch.ones(2, 4, 6, 7).long()}, TypeError, "x must be floating point, got torch.int64"),
    ({"weight": torch.ones(18, 4, 3)}, ValueError, "weight must have shape .*, got \\(18, 4, 3\\)"),
    ({"weight": torch.ones(18, 4, 3, 3).bfloat16()}, TypeError, "x is torch.float32 but weight is torch.bfloat16"),
    ({"weight": torch.ones(18, 4, 0, 3)}, ValueError, "kernel_size"),
    ({"weight": torch.ones(17, 4, 3, 3)}, ValueError, "weight has 17 rows, which 3 kernels"),
    ({"weight": torch.ones(18, 4, 3, 3, device="meta")}, ValueError, "x is on cpu but weight on meta"),
    ({"assign": torch.rand(2, 3, 9, 6, 7).bfloat16()}, TypeError, "x is torch.float32 but assign is torch.bfloat16"),
    ({"assign": torch.rand(2, 3, 9, 2, 2)}, ValueError, r"assign must have shape .*, got \(2, 3, 9, 2, 2\)"),
    ({"assign": torch.rand(2, 0, 9, 6, 7)}, ValueError, "0 kernels"),
    ({"assign": torch.rand(3)}, ValueError, r"assign must have shape .*, got \(3,\)"),
    ({"assign": torch.rand(2, 3, 9, 6, 7, device="meta")}, ValueError, "x is on cpu but assign on meta"),
    ({"stride": [0, 1]}, ValueError, r"stride must be .* ≥ 1 .*, got \[0, 1\]"),
    ({"stride": [1]}, ValueError, r"stride must be .*, got \[1\]"),
    ({"stride": []}, ValueError, r"stride must be .*, got \[\]"),
    ({"dilation": [1, -1]}, ValueError, r"dilation must be .*, got \[1, -1\]"),
    ({"dilation": [1, 1, 1]}, ValueError, r"dilation must be .*, got \[1, 1, 1\]"),
    ({"padding": [1, 1]}, ValueError, r"padding must be four integers ≥ 0 .*, got \[1, 1\]"),
    ({"padding": [1, 1, 1, -1]}, ValueError, r"padding must be four .*, got \[1, 1, 1, -1\]"),
    ({"padding": [0, 0, 0, 0], "dilation": [9, 9]}, ValueError, "x of 6×7 is smaller than kernel_size"),
    ({"groups": 0}, ValueError, "groups and .* must be at least 1, got 0"),
    ({"groups": 2}, ValueError, "x must have 8 channels, got 4"),
    ({"engine": "fastest"}, ValueError, "engine must be 'auto' or one of .*, got 'fastest'"),
]
WRONG_FORWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bias": torch.ones(18)}, ValueError, r"bias must have shape \(O,\) = \(6,\), got \(18,\)"),
    ({"bias": torch.ones(6).double()}, TypeError, "x is torch.float32 but bias is torch.float64"),
]
WRONG_BACKWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"grad": torch.ones(2, 6, 2, 2)}, ValueError, r"grad must have shape .* = \(2, 6, 6, 7\), got \(2, 6, 2, 2\)"),
    ({"grad": torch.ones(2, 6, 6, 7).double()}, TypeError, "x is torch.float32 but grad is torch.float64"),
    ({"grad": torch.ones(2, 6, 6, 7, device="meta")}, ValueError, "x is on cpu but grad on meta"),
    ({"needs": [True]}, ValueError, r"needs must be three booleans, .* got \[True\]"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG + WRONG_FORWARD)
def test_the_raw_operator_checks_its_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        torch.ops.malleable.depth_conv2d(**raw_call() | change)


@pytest.mark.parametrize(("change", "error", "message"), WRONG + WRONG_BACKWARD)
def test_the_raw_backward_checks_its_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        torch.ops.malleable.depth_conv2d_backward(**raw_call(backward=True) | change)


SIZES = st.integers(0, 5)
LISTS = st.lists(st.integers(-1, 2), max_size=5)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64])


@given(data=st.data(), backward=st.booleans())
def test_any_call_is_refused_or_right(data: st.DataObject, backward: bool) -> None:
    """One argument of a valid call becomes anything: an error of the two kinds, or what the plain engine computes."""
    call = raw_call(backward)
    name = data.draw(st.sampled_from(sorted(call.keys() - {"engine", "needs"})))
    if name == "groups":
        call[name] = data.draw(st.integers(-1, 6))
    elif isinstance(call[name], Tensor):
        shape = list(call[name].shape)
        if data.draw(st.booleans()):
            shape[data.draw(st.integers(0, len(shape) - 1))] = data.draw(SIZES)
        else:
            shape = data.draw(st.lists(SIZES, max_size=5))
        call[name] = torch.ones(shape, dtype=data.draw(DTYPES))
    else:
        call[name] = data.draw(LISTS)
    run = torch.ops.malleable.depth_conv2d_backward if backward else torch.ops.malleable.depth_conv2d
    try:
        results = run(**call)
    except (ValueError, TypeError):
        return
    torch.testing.assert_close(results, run(**call | {"engine": "plain"}), rtol=1e-4, atol=1e-4)


def test_numbers_beyond_c_integers_do_not_reach_the_native_engine() -> None:
    x, weight, assign = torch.randn(1, 2, 4, 4), torch.randn(4, 2, 1, 1), torch.rand(1, 2, 1, 1, 1)
    huge = depth_conv2d(x, weight, assign, stride=2**33)
    torch.testing.assert_close(huge, depth_conv2d(x, weight, assign, stride=4))
