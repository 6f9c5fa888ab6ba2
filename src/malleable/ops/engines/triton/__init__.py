"""The CUDA engine runs Triton kernels that gather patches as they multiply, so that no patch is ever stored.

This is the host side: checks, layouts, workspaces and launches. Triton is imported when the first CUDA tensor arrives.
There are three kernels for matrices, which take narrow groups some at a time, and three for depthwise convolutions.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from math import gcd
from typing import Any

import torch
from torch import Tensor

from malleable.ops.engines.plain import Gradients, Needs, output_format
from malleable.ops.window import Window

name = "triton"

WORKSPACE = 32 * 2**20
"""Bytes of partial sums kept at once; a single set of them may be larger."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SPLIT_PIXELS = 128  # a multiple of every BLOCK_P, so that splits of the weight gradient are whole tiles
_NARROWEST = 16  # channels of the smallest tile that tensor cores take

_failed: dict[tuple[object, ...], str] = {}
"""Kinds of calls whose kernels could not be started here, with the reason."""


class LaunchError(RuntimeError):
    """Says that a kernel could not be compiled or started, and why."""


def can_run(x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> str | None:
    """Return None if the engine can run the call, else the reason why not."""
    if not x.is_cuda and not _interpreter_wanted():
        return f"needs a CUDA tensor, got one on {x.device}"
    if x.is_cuda and (torch.version.hip or torch.cuda.get_device_capability(x.device) < (8, 0)):
        return f"needs an NVIDIA GPU of compute capability 8.0 or later, got {torch.cuda.get_device_name(x.device)}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if x.dtype not in _DTYPES or not x.dtype == weight.dtype == assign.dtype:
        given = ", ".join(str(t.dtype) for t in (x, weight, assign))
        return f"needs x, weight and assign all in float16, bfloat16 or float32, got {given}"
    pixels, outputs = x.shape[2] * x.shape[3], assign.shape[3] * assign.shape[4]
    counts = (x.shape[1] * pixels, weight.shape[0] // assign.shape[1] * outputs, assign[:1].numel(), weight.numel())
    if max(*counts, x.shape[0] * max(pixels, outputs)) >= 2**31:
        return "cannot count beyond 2³¹ entries in a sample of x, y or assign, in the pixels of a batch or in weight"
    from malleable.ops.engines.triton.kernels import INTERPRETED

    if bool(INTERPRETED) != _interpreter_wanted():
        return "TRITON_INTERPRET was set or cleared after Triton had been imported: do so before importing malleable"
    return _failed.get(_kind(x, weight, assign, groups)) if _failed else None


def forward(x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> Tensor:
    """Compute y (N, O, Hout, Wout), channels-last if x or weight is. Arguments are as in ``plain.forward``."""
    layout = output_format(x, weight)
    x = x.contiguous(memory_format=layout)
    shape = (x.shape[0], weight.shape[0] // assign.shape[1], *assign.shape[-2:])
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    if y.numel():
        tensors = {"x": x, "weight": _packed(weight, assign, groups), "assign": assign.contiguous(), "y": y}
        pixels = y.shape[0] * y.shape[2] * y.shape[3]
        common = _arguments(x, weight, assign, window, groups, pixels)

        def grid(meta: dict[str, Any]) -> tuple[int, ...]:
            side = "OUT" if "OUT_C" in common else "IN"
            blocks = _blocks(common[f"{side}_C"], meta[f"BLOCK_{side}"])
            return _blocks(pixels, meta["BLOCK_P"]) * blocks, common.get("GROUPS", 1)

        _launch("forward", grid, tensors | common)
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, needs: Needs
) -> Gradients:
    """Compute the gradients of x, weight and assign, None where not needed. Arguments are as in ``plain.backward``.

    All sums run in an order that depends on nothing but the shapes and the tiles chosen: no atomics.
    """
    if x.shape[0] == 0:
        empty = (torch.zeros_like(t) if need else None for t, need in zip((x, weight, assign), needs, strict=True))
        return tuple(empty)  # type: ignore[return-value]
    layout = output_format(x, weight)
    grad, x = (t.to(x.dtype).contiguous(memory_format=layout) for t in (grad, x))
    assign = assign.contiguous()
    grad_x = grad_weight = grad_assign = None
    if needs[0] or needs[2]:
        grad_x, grad_assign = _data_gradients(grad, x, weight, assign, window, groups, (needs[0], needs[2]))
    if needs[1]:
        grad_weight = _weight_gradient(grad, x, weight, assign, window, groups)
    return grad_x, grad_weight, grad_assign


def _data_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute those of x and assign. Each launch leaves its units' shares of the latter in a bounded workspace."""
    from malleable.ops.engines.triton.tuning import block_in

    (stride_h, stride_w), (dilation_h, dilation_w) = window.stride, window.dilation
    pixels = x.shape[0] * _blocks(x.shape[2], stride_h) * _blocks(x.shape[3], stride_w)  # of the largest phase
    common = _arguments(x, weight, assign, window, groups, pixels)
    block = block_in(common["IN_C"], _arithmetic(x.dtype) if "OUT_C" in common else "single")
    units = common.get("GROUPS", 1) * _blocks(common["IN_C"], block)
    together = min(units, max(1, WORKSPACE // (4 * assign.numel()))) if needs[1] else units
    grad_x = torch.empty_like(x) if needs[0] else None
    grad_assign = shares = None
    if needs[1]:
        # Entries that only padding could reach are never written.
        grad_assign = torch.zeros_like(assign, dtype=None if units == 1 else torch.float32)
        shares = grad_assign if units == 1 else assign.new_zeros(together, *assign.shape, dtype=torch.float32)
    tensors = {"grad": grad, "weight": _packed(weight, assign, groups), "assign": assign, "x": x}
    tensors |= {"grad_x": x if grad_x is None else grad_x, "grad_assign": assign if shares is None else shares}
    common |= {"step_h": stride_h // gcd(stride_h, dilation_h), "step_w": stride_w // gcd(stride_w, dilation_w)}
    common |= {"NEED_X": needs[0], "NEED_ASSIGN": needs[1], "BLOCK_IN": block}
    for first in range(0, units, together):
        count = min(together, units - first)

        def grid(meta: dict[str, Any], count: int = count) -> tuple[int, ...]:
            return _blocks(pixels, meta["BLOCK_P"]) * count, stride_h * stride_w

        _launch("data_gradients", grid, tensors | common | {"units": count, "first_unit": first})
        if grad_assign is not None and shares is not None and units > 1:
            grad_assign += shares[:count].sum(0)
    return grad_x, None if grad_assign is None else grad_assign.to(assign.dtype)


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int) -> Tensor:
    """Add up the shares that each split of the pixels leaves in a workspace of bounded size."""
    pixels = grad.shape[0] * grad.shape[2] * grad.shape[3]
    common = _arguments(x, weight, assign, window, groups, pixels)
    if "OUT_C" not in common:
        tiles = window.kernel_size[0] * _blocks(common["IN_C"], 32)
    else:
        tiles = window.taps * common["GROUPS"] * _blocks(common["IN_C"], 64) * _blocks(common["OUT_C"], 64)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 64
    wanted = min(4 * processors // tiles, WORKSPACE // (4 * weight.numel()), _blocks(pixels, 8 * _SPLIT_PIXELS))
    per_split = _blocks(_blocks(pixels, max(1, wanted)), _SPLIT_PIXELS) * _SPLIT_PIXELS
    splits = _blocks(pixels, per_split)
    rows, columns, kh, kw = weight.shape
    shares = weight.new_empty(splits, rows, kh, kw, columns, dtype=weight.dtype if splits == 1 else torch.float32)

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        in_blocks = _blocks(common["IN_C"], meta["BLOCK_IN"])
        if "OUT_C" not in common:
            return window.kernel_size[0] * in_blocks, splits
        return window.taps * in_blocks * _blocks(common["OUT_C"], meta["BLOCK_OUT"]), common["GROUPS"], splits

    tensors = {"x": x, "grad": grad, "assign": assign, "grad_weight": shares}
    _launch("weight_gradient", grid, tensors | common | {"pixels_per_split": per_split})
    total = shares[0] if splits == 1 else shares.sum(0).to(weight.dtype)
    return total.permute(0, 3, 1, 2)


def _arguments(x: Tensor, weight: Tensor, assign: Tensor, window: Window, groups: int, pixels: int) -> dict[str, Any]:
    """List what all kernels are told besides tensors. Layers whose pixels differ by less than twice tune as one."""
    common = {
        "batch": x.shape[0],
        "in_h": x.shape[2],
        "in_w": x.shape[3],
        "out_h": assign.shape[3],
        "out_w": assign.shape[4],
        "stride_h": window.stride[0],
        "stride_w": window.stride[1],
        "top": window.padding[2],
        "left": window.padding[0],
        "dilation_h": window.dilation[0],
        "dilation_w": window.dilation[1],
        "size_class": pixels.bit_length(),
        "KERNELS": assign.shape[1],
        "KH": window.kernel_size[0],
        "KW": window.kernel_size[1],
        "CHANNELS_LAST": output_format(x, weight) == torch.channels_last,
    }
    if _is_depthwise(weight, assign, groups):
        return common | {"IN_C": groups}
    into, out = weight.shape[1], weight.shape[0] // assign.shape[1] // groups
    pack = pack_of(into, out, groups)
    return common | {
        "GROUPS": groups // pack,
        "IN_C": pack * into,
        "OUT_C": pack * out,
        "PACK": pack,
        "PRECISION": "ieee" if _arithmetic(x.dtype) == "ieee" else "tf32",  # 16-bit products are exact either way
    }


def pack_of(into: int, out: int, groups: int) -> int:
    """Choose how many groups of so many channels share one matrix: those that fill the narrowest tile."""
    return max(n for n in range(1, max(1, _NARROWEST // max(into, out)) + 1) if groups % n == 0)


def _is_depthwise(weight: Tensor, assign: Tensor, groups: int) -> bool:
    """Tell whether every channel is a group, in and out."""
    return groups > 1 and weight.shape[1] == 1 and weight.shape[0] == assign.shape[1] * groups


def _kind(x: Tensor, weight: Tensor, assign: Tensor, groups: int) -> tuple[object, ...]:
    """Name the calls that run the same compiled kernels, or nearly so."""
    return x.device, x.dtype, weight.shape, assign.shape[1], groups, output_format(x, weight)


def _launch(kernel: str, grid: Any, arguments: dict[str, Any]) -> None:
    arithmetic = _arithmetic(arguments["x"].dtype)
    if "OUT_C" not in arguments:
        kernel, arithmetic = f"depthwise_{kernel}", "half" if arithmetic == "half" else "single"
    elif max(arguments["IN_C"], arguments["OUT_C"]) <= 2 * _NARROWEST:
        kernel = f"narrow_{kernel}"
    try:
        from malleable.ops.engines.triton.tuning import launch

        with torch.cuda.device_of(arguments["x"]):  # type: ignore[no-untyped-call]
            launch(kernel, arithmetic, grid, arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compiler, assembler, linker, driver and file system each have their own
        raise LaunchError(f"{kernel} could not be started: {type(error).__name__}: {error}") from error


def give_up(error: LaunchError, x: Tensor, weight: Tensor, assign: Tensor, groups: int) -> None:
    """Refuse calls of this kind from now on, for the reason that ``error`` names."""
    _failed[_kind(x, weight, assign, groups)] = f"failed before: {error}"


def _interpreter_wanted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _arithmetic(dtype: torch.dtype) -> str:
    """Tell what is multiplied: 16-bit numbers, or float32 as PyTorch's own convolutions take it, TF32 or as it is."""
    if dtype != torch.float32:
        return "half"
    conv = getattr(torch.backends.cudnn, "conv", None)  # the older switch may refuse to be read once this one is set
    tf32 = torch.backends.cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def _packed(weight: Tensor, assign: Tensor, groups: int) -> Tensor:
    """Lay weights out as (K·O, kh, kw, C / groups) in memory, without a copy for channels-last ones.

    Those of depthwise convolutions lie as (kh, kw, K·C).
    """
    if _is_depthwise(weight, assign, groups):
        return weight.permute(2, 3, 0, 1).contiguous()
    return weight.permute(0, 2, 3, 1).contiguous()


def _blocks(n: int, size: int) -> int:
    return -(-n // size)
