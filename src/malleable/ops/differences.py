"""The depth differences of ``geometry.py`` in one pass of C++, where nobody asks for their gradient."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from malleable.ops.direct import is_direct, is_recorded, pointer
from malleable.ops.engines import wish
from malleable.ops.engines.native import Problem, check
from malleable.ops.engines.native.build import library
from malleable.ops.window import Window

_MOST = 2**24  # floats of workspace


def fast_differences(
    depth: Tensor,
    focal: Tensor,
    window: Window,
    size: tuple[int, int],
    rate: int,
    unit: float,
    bounds: tuple[float, float],
) -> tuple[Tensor, Tensor] | None:
    """Differences (N, taps, Hout, Wout) and where they are valid, or None where only PyTorch can compute them.

    Args:
        depth: (N, 1, H, W) at image resolution.
        focal: (N,)
        size: of the feature map.
        rate: pixels of the image that one step on the feature map is.
        unit: rate · dilation for relative differences, 0 for differences in metres.
        bounds: depth that counts as known lies between these.
    """
    if not depth.dtype == focal.dtype == torch.float32 or is_recorded(depth, focal):
        return None
    if not is_direct(depth, focal) or wish() not in ("auto", "native"):
        return None
    built = library()
    if isinstance(built, str):
        return None
    call = _call(built, depth.shape, depth.stride(), window, size, torch.get_num_threads())
    if call is None:
        return None
    run, shape = call
    focal = focal.contiguous()
    value = torch.empty(shape, dtype=torch.float32, device=depth.device)
    valid = torch.empty(shape, dtype=torch.bool, device=depth.device)
    check(run(pointer(depth), pointer(focal), rate, unit, *bounds, pointer(value), pointer(valid)))
    return value, valid


@functools.lru_cache(maxsize=1024)
def _call(
    built: ctypes.CDLL,
    depth: torch.Size,
    strides: tuple[int, ...],
    window: Window,
    size: tuple[int, int],
    threads: int,
) -> tuple[Callable[..., int], tuple[int, ...]] | None:
    """Find the function for depth of such a shape and strides, and the shape of what it writes."""
    batch, output = depth[0], window.output_size(size)
    height, width = (
        (o - 1) * s + d * (k - 1) + 1
        for o, s, d, k in zip(output, window.stride, window.dilation, window.kernel_size, strict=True)
    )
    if min(output) < 1 or batch * height * width > _MOST:
        return None
    left, _, top, _ = window.padding
    grid = (*window.kernel_size, *window.stride, *window.dilation, top, left)
    problem = Problem(batch, 1, 1, 1, 1, *size, *output, *grid, threads, strides)
    return functools.partial(built.depth_difference, ctypes.byref(problem)), (batch, window.taps, *output)
