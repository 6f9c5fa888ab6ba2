"""The tile sizes each Triton kernel may run with, and the tuner that picks one per layer on the GPU at hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton

from malleable.ops import triton_kernels

KERNELS: dict[str, Any] = {
    "forward": triton_kernels.forward_kernel,
    "data_gradients": triton_kernels.data_gradients_kernel,
    "weight_gradient": triton_kernels.weight_gradient_kernel,
}

MOST_CHANNELS = 64
"""In one unit of data_gradients_kernel, whose BLOCK_IN follows from the layer: the workspace depends on it."""


def _configs(*blocks: tuple[int, int | None, int, int, int]) -> list[triton.Config]:
    return [
        triton.Config(
            {"BLOCK_P": p, "BLOCK_OUT": o} | ({} if i is None else {"BLOCK_IN": i}), num_warps=warps, num_stages=stages
        )
        for p, i, o, warps, stages in blocks
    ]


# BLOCK_P, BLOCK_IN, BLOCK_OUT, warps, stages; the smallest last. None of them spills, see docs/triton.md.
CONFIGS: dict[tuple[str, str], list[triton.Config]] = {
    ("forward", "half"): _configs(
        (128, 64, 64, 8, 3), (128, 32, 128, 8, 4), (256, 32, 64, 8, 3), (64, 64, 64, 4, 3), (64, 32, 32, 4, 3)
    ),
    ("forward", "tf32"): _configs((128, 32, 64, 8, 3), (64, 32, 64, 4, 3), (64, 32, 32, 4, 3)),
    ("forward", "ieee"): _configs((64, 16, 64, 4, 3), (64, 32, 32, 4, 3)),
    ("data_gradients", "half"): _configs((128, None, 64, 8, 3), (64, None, 64, 8, 3), (64, None, 32, 4, 3)),
    ("data_gradients", "tf32"): _configs((64, None, 32, 8, 3), (32, None, 32, 4, 3)),
    ("data_gradients", "ieee"): _configs((64, None, 32, 8, 3), (32, None, 32, 4, 3)),
    ("weight_gradient", "half"): _configs((64, 64, 64, 8, 3), (32, 128, 64, 8, 3), (32, 64, 64, 4, 3), (32, 32, 32, 4, 3)),
    ("weight_gradient", "tf32"): _configs((32, 64, 64, 8, 3), (32, 32, 32, 4, 3)),
    ("weight_gradient", "ieee"): _configs((16, 64, 64, 8, 3), (32, 32, 32, 4, 3)),
}
"""By kernel and by what it multiplies: 16-bit numbers, float32 as TF32, or float32 as it is."""


def launch(kernel: str, grid: Callable[[dict[str, Any]], tuple[int, ...]], arguments: dict[str, Any]) -> None:
    """Run one of KERNELS with the best of its configurations, found by timing them when a layer is first seen."""
    arithmetic = "half" if arguments["assign"].element_size() == 2 else arguments["PRECISION"]
    if triton_kernels.INTERPRETED:
        KERNELS[kernel][grid](**arguments, **CONFIGS[kernel, arithmetic][-1].kwargs)
    else:
        # Fused multiply-adds: Triton means to turn them off by default.
        _tuned(kernel, arithmetic)[grid](**arguments, enable_fp_fusion=True)


@cache
def _tuned(kernel: str, arithmetic: str) -> Any:
    key = ["size_class", "stride_h", "stride_w", "KERNELS", "KH", "KW", "GROUPS", "IN_C", "OUT_C", "CHANNELS_LAST"]
    key += ["NEED_X", "NEED_ASSIGN"] if kernel == "data_gradients" else []
    prune = {"early_config_prune": fitting}
    return triton.autotune(CONFIGS[kernel, arithmetic], key, prune_configs_by=prune)(KERNELS[kernel])


def fitting(configs: list[triton.Config], named: dict[str, Any], **arguments: Any) -> list[triton.Config]:
    """The configurations worth a trial: blocks no larger than the layer's channels. The smallest always is."""
    most = {f"BLOCK_{side}": max(16, triton.next_power_of_2(arguments[f"{side}_C"])) for side in ("IN", "OUT")}
    return [c for c in configs if c is configs[-1] or all(c.kwargs.get(name, 0) <= most[name] for name in most)]
