"""What the Triton tests do in a process of their own: TRITON_INTERPRET counts only before Triton is first imported."""

from __future__ import annotations

import logging.handlers
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from malleable import functional
from malleable.ops.engines import plain
from malleable.ops.engines import triton as triton_engine
from malleable.ops.window import Window

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def start() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    channels: tuple[int, int] = (20, 24)
    size: tuple[int, int] = (4, 5)
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (1, 1, 1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    kernels: int = 2
    batch: int = 2
    dtype: str = "float32"
    channels_last: bool = False

    @property
    def window(self) -> Window:
        return Window(self.kernel, self.stride, self.padding, self.dilation)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, weight, assign, grad."""
        torch.manual_seed(0)
        into, out = self.channels
        height, width = self.window.output_size(self.size)
        x = torch.randn(self.batch, into, *self.size)
        weight = torch.randn(self.kernels * out, into // self.groups, *self.kernel)
        assign = torch.rand(self.batch, self.kernels, self.window.taps, height, width)
        grad = torch.randn(self.batch, out, height, width)
        if self.channels_last:
            x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
        x, weight, assign, grad = (_between_nans(t.to(DTYPES[self.dtype])) for t in (x, weight, assign, grad))
        return x, weight, assign, grad


def _between_nans(t: Tensor) -> Tensor:
    """The same tensor in memory whose surroundings betray a read beyond either end."""
    margin = 2 * t.numel() + 4096
    memory = torch.full((t.numel() + 2 * margin,), torch.nan, dtype=t.dtype)
    return memory.as_strided(t.shape, t.stride(), margin).copy_(t)


def errors(case: Case, needs: tuple[bool, bool, bool] = (True, True, True)) -> dict[str, float]:
    """Largest error of the output and of each gradient asked for, as a share of the largest entry, against float64."""
    x, weight, assign, grad = case.tensors()
    call = (case.window, case.groups)
    assert triton_engine.can_run(x, weight, assign, *call) is None
    y = triton_engine.forward(x, weight, assign, *call)
    assert y.dtype == x.dtype
    assert y.is_contiguous(memory_format=torch.channels_last if case.channels_last else torch.contiguous_format)
    gradients = triton_engine.backward(grad, x, weight, assign, *call, needs)
    exact = [t.double() for t in (x, weight, assign)]
    expected = plain.backward(grad.double(), *exact, *call, (True, True, True))
    found = {"y": _error(y, plain.forward(*exact, *call))}
    for name, need, ours, reference, like in zip(
        ("x", "weight", "assign"), needs, gradients, expected, (x, weight, assign), strict=True
    ):
        assert (ours is not None) == need, name
        if ours is not None:
            assert (ours.shape, ours.dtype) == (like.shape, like.dtype), name
            found[name] = _error(ours, reference)
    return found


def errors_with(case: Case, kernel: str, arithmetic: str, number: int) -> dict[str, float]:
    """``errors`` with one of the shipped configurations of one kernel."""
    from malleable.ops.engines.triton import tuning as triton_tuning

    shipped = triton_tuning.CONFIGS[kernel, arithmetic]
    precision = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = arithmetic != "ieee"
    triton_tuning.CONFIGS[kernel, arithmetic] = [shipped[number]]
    try:
        gradient = not kernel.endswith("forward")
        return errors(case, (gradient, kernel.endswith("weight_gradient"), gradient))
    finally:
        triton_tuning.CONFIGS[kernel, arithmetic] = shipped
        torch.backends.cudnn.allow_tf32 = precision


def errors_in_workspace(case: Case, size: int) -> dict[str, float]:
    """``errors`` with a workspace of ``size`` bytes."""
    usual, triton_engine.WORKSPACE = triton_engine.WORKSPACE, size
    try:
        return errors(case)
    finally:
        triton_engine.WORKSPACE = usual


def errors_of_operator() -> dict[str, float]:
    """The public function on strided views, with bias, differentiated by autograd from an expanded gradient."""
    results = []
    for engine, dtype in (("triton", torch.float32), ("plain", torch.float64)):
        torch.manual_seed(0)
        x = torch.randn(6, 18, 2, 9, dtype=torch.float64).to(dtype).permute(2, 1, 0, 3)[..., ::2].requires_grad_()
        weight = torch.randn(2 * 5, 18, 3, 3, dtype=torch.float64).to(dtype).requires_grad_()
        assign = torch.rand(2, 2, 9, 5, 6, dtype=torch.float64).to(dtype).transpose(3, 4).requires_grad_()
        bias = torch.randn(5, dtype=torch.float64).to(dtype).requires_grad_()
        y = functional.depth_conv2d(x, weight, assign, bias, padding=1, engine=engine)
        results.append((y.detach(), *torch.autograd.grad(y.sum(), (x, weight, assign, bias))))
    names = ("y", "x", "weight", "assign", "bias")
    return {name: _error(ours, reference) for name, ours, reference in zip(names, *results, strict=True)}


def fallen_back(backward: bool) -> tuple[list[str], list[str], float]:
    """Two training steps of one kind whose kernels cannot be started, in backward only or from the beginning.

    Returns the kernels tried, the warnings given, and the largest error.
    """
    from malleable.ops.depth_conv2d import _engines as chosen_engines
    from malleable.ops.engines.triton import tuning as triton_tuning

    tried: list[str] = []
    usual = triton_tuning.launch

    def launch(kernel: str, *arguments: Any) -> None:
        tried.append(kernel)
        if not backward or "gradient" in kernel:
            raise RuntimeError("out of luck")
        usual(kernel, *arguments)

    case, found = Case(channels=(6, 6), groups=6), []
    x, weight, assign, grad = (t.requires_grad_() for t in case.tensors())
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("malleable").addHandler(handler)
    triton_tuning.launch = launch
    try:
        for _ in range(2):
            y = functional.depth_conv2d(x, weight, assign, padding=1, groups=6)
            found = [y, *torch.autograd.grad(y, (x, weight, assign), grad)]
    finally:
        triton_tuning.launch = usual
        triton_engine._failed.clear()
        chosen_engines.clear()
        logging.getLogger("malleable").removeHandler(handler)
    exact = [t.detach().double() for t in (x, weight, assign)]
    call = (*exact, case.window, 6)
    expected = [plain.forward(*call), *plain.backward(grad.double(), *call, (True, True, True))]
    error = max(_error(ours, reference) for ours, reference in zip(found, expected, strict=True))
    return tried, [record.getMessage() for record in handler.buffer], error


def failure_when_asked_for() -> str:
    """What a call says that names the engine and whose kernel cannot be started."""
    from malleable.ops.engines.triton import tuning as triton_tuning

    def launch(*arguments: Any) -> None:
        raise FileNotFoundError("no C compiler")

    usual, triton_tuning.launch = triton_tuning.launch, launch
    x, weight, assign, _ = Case().tensors()
    try:
        functional.depth_conv2d(x, weight, assign, padding=1, engine="triton")
    except RuntimeError as error:
        return str(error)
    finally:
        triton_tuning.launch = usual
    return "no error"


def reason(dtype: str, channels: int, groups: int) -> str | None:
    """Why the engine refuses such a call."""
    x = torch.zeros(1, channels, 4, 4, dtype=getattr(torch, dtype))
    weight, assign = x.new_zeros(channels, channels // groups, 1, 1), x.new_zeros(1, 1, 1, 4, 4)
    return triton_engine.can_run(x, weight, assign, Window((1, 1)), groups)


_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"channels_last": False}, {"assign_learned": False}, {"kernels": 1})

LAYERS: dict[str, list[dict[str, Any]]] = {
    "": [
        {"channels": channels, "strided": strided, **settings}
        for channels, strided in ((64, False), (256, True))
        for settings in _VARIANTS
    ]
    + [
        {"channels": 256},
        {"half": "fp16"},
        {"ones": ("batch", "top", "left", "dilation_h", "dilation_w", "units")},
        {"ones": ("batch", "in_h", "in_w", "out_h", "out_w", "top", "left", "dilation_h", "dilation_w", "units")},
    ],
    "narrow": [
        {"channels": channels, "groups": groups, "strided": channels > 256, **settings}
        for channels, groups in ((128, 32), (256, 32), (512, 32), (336, 14))  # of 4, 8, 16 and 24
        for settings in (*_VARIANTS, {"half": "fp16"})
    ],
    "depthwise": [
        {"channels": channels, "groups": channels, "kernel_size": size, "strided": channels > 96, **settings}
        for channels, size in ((96, 7), (240, 5), (672, 3))
        for settings in (*_VARIANTS, {"half": "fp16"}, {"kernels": 4})
    ],
}
"""What kernels are compiled for in full: layers of ResNet, of ResNeXt and RegNet, of ConvNeXt and MobileNet."""


def kind(kernel: str) -> str:
    """The kind of layers that a kernel is for, a key of LAYERS."""
    return next(name for name in ("narrow", "depthwise", "") if kernel.startswith(name))


def compiled(
    capability: int, kernel: str, arithmetic: str, layers: list[dict[str, Any]], first_only: bool
) -> dict[str, dict[str, Any]]:
    """What the configurations of a kernel for each layer take when compiled, by a name for each."""
    import compiled_kernels

    found = {}
    for settings in layers:
        layer = compiled_kernels.Layer(**settings)
        if not kernel.endswith("data_gradients") and not layer.assign_learned:
            continue
        for config in compiled_kernels.shipped(kernel, arithmetic, layer)[: 1 if first_only else None]:
            usage = compiled_kernels.compile_for(capability, kernel, arithmetic, config, layer)
            found[f"{layer} {config}"] = {
                "registers": usage.registers,
                "stack": usage.stack,
                "shared": usage.shared,
                "limit": compiled_kernels.SHARED_MEMORY[capability],
                "atomics": re.findall(r"\b(?:atom|red)\.global\S*", usage.ptx),
            }
    return found


def tuned(case: Case) -> list[tuple[str, int, int, list[int]]]:
    """A training step whose kernels only say how they are called, the time of each standing for its BLOCK_P.

    Returns, for each of them: its name, how many configurations were tried, the BLOCK_P kept, and the last grid.
    """
    from malleable.ops.engines.triton import tuning as triton_tuning

    calls: dict[str, list[dict[str, Any]]] = {}
    for name, arithmetic in triton_tuning.CONFIGS:
        if arithmetic not in ("tf32", "single"):
            continue
        calls[name] = []
        tuner = triton_tuning._tuned(name, arithmetic)
        tuner.fn = SimpleNamespace(run=lambda name=name, **arguments: calls[name].append(arguments))
        tuner.__dict__["do_bench"] = lambda call, quantiles, name=name: (call(), [calls[name][-1]["BLOCK_P"]] * 3)[1]
    x, weight, assign, grad = case.tensors()
    triton_engine.forward(x, weight, assign, case.window, case.groups)
    triton_engine.backward(grad, x, weight, assign, case.window, case.groups, (True, True, True))
    triton_tuning._tuned.cache_clear()
    return [(name, len(of) - 1, of[-1]["BLOCK_P"], list(of[-1]["grid"](of[-1]))) for name, of in calls.items() if of]


def shipped() -> dict[tuple[str, str], int]:
    """How many configurations there are for each kernel and arithmetic."""
    from malleable.ops.engines.triton import tuning as triton_tuning

    return {key: len(configs) for key, configs in triton_tuning.CONFIGS.items()}


def _error(ours: Tensor, reference: Tensor | None) -> float:
    assert reference is not None
    assert ours.shape == reference.shape
    if not ours.numel():
        return 0.0
    return float((ours.double() - reference).abs().max() / reference.abs().max().clamp(min=1e-30))
