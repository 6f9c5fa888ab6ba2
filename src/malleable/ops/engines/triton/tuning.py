"""Each Triton kernel may run with these tile sizes; the tuner picks one per layer on the GPU at hand."""

# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import triton

from malleable.ops.engines.triton import depthwise
from malleable.ops.engines.triton import kernels as triton_kernels

KERNELS: dict[str, Any] = {
    f"{kind}{name}": getattr(module, f"{name}_kernel")
    for kind, module in (("", triton_kernels), ("narrow_", triton_kernels), ("depthwise_", depthwise))
    for name in ("forward", "data_gradients", "weight_gradient")
}
"""The kernels by name. Narrow ones are those for matrices, with tiles for few channels: of one group or of a pack."""


def _configs(*choices: tuple[int, int | None, int | None, int, int, int | None]) -> list[triton.Config]:
    configs = []
    for *blocks, warps, stages, registers in choices:
        sizes = {f"BLOCK_{side}": size for side, size in zip(("P", "IN", "OUT"), blocks, strict=True) if size}
        configs.append(triton.Config(sizes, num_warps=warps, num_stages=stages, maxnreg=registers))
    return configs


# BLOCK_P, BLOCK_IN, BLOCK_OUT, warps, stages, registers; the smallest last. None of them spills, see docs/triton.md:
# registers are named where the assembler, left alone, aims at more warps at a time and spills for it.
CONFIGS: dict[tuple[str, str], list[triton.Config]] = {
    ("forward", "half"): _configs(
        (128, 64, 64, 8, 3, None),
        (128, 32, 128, 8, 4, None),
        (256, 32, 64, 8, 3, None),
        (64, 64, 64, 4, 3, None),
        (64, 32, 32, 4, 3, None),
    ),
    ("forward", "tf32"): _configs((128, 32, 64, 8, 3, 255), (64, 32, 64, 4, 3, 255), (64, 32, 32, 4, 3, 255)),
    ("forward", "ieee"): _configs((64, 32, 32, 4, 3, None)),
    ("data_gradients", "half"): _configs(
        (128, None, 64, 8, 3, 255), (64, None, 64, 8, 3, None), (32, None, 64, 4, 3, 255)
    ),
    ("data_gradients", "tf32"): _configs((64, None, 32, 8, 3, 255), (32, None, 32, 4, 3, 255)),
    ("data_gradients", "ieee"): _configs((64, None, 16, 8, 3, 255), (32, None, 16, 4, 3, 255)),
    ("weight_gradient", "half"): _configs(
        (64, 64, 64, 8, 3, 255), (32, 128, 64, 8, 3, None), (32, 64, 64, 4, 3, None), (32, 32, 32, 4, 3, None)
    ),
    ("weight_gradient", "tf32"): _configs((32, 64, 64, 8, 3, None), (32, 32, 32, 4, 3, 255)),
    ("weight_gradient", "ieee"): _configs((16, 64, 64, 8, 3, None), (32, 32, 32, 4, 3, 255)),
    ("narrow_forward", "half"): _configs((128, 32, 32, 4, 3, None), (128, 16, 16, 4, 3, None)),
    ("narrow_forward", "tf32"): _configs((128, 32, 32, 8, 3, None), (128, 16, 16, 4, 3, 255)),
    ("narrow_forward", "ieee"): _configs((64, 32, 32, 4, 3, None), (64, 16, 16, 4, 3, None)),
    ("narrow_data_gradients", "half"): _configs((64, None, 32, 4, 3, None), (128, None, 16, 4, 3, None)),
    ("narrow_data_gradients", "tf32"): _configs((64, None, 32, 4, 3, None), (128, None, 16, 4, 3, None)),
    ("narrow_data_gradients", "ieee"): _configs((64, None, 16, 8, 3, 255)),
    ("narrow_weight_gradient", "half"): _configs((64, 32, 32, 4, 3, None), (64, 16, 16, 4, 3, None)),
    ("narrow_weight_gradient", "tf32"): _configs((64, 32, 32, 4, 3, None), (64, 16, 16, 4, 3, None)),
    ("narrow_weight_gradient", "ieee"): _configs((32, 32, 32, 4, 3, None), (32, 16, 16, 4, 3, None)),
    ("depthwise_forward", "half"): _configs(
        (64, 32, None, 4, 1, 255), (32, 64, None, 8, 1, 255), (16, 32, None, 2, 1, 255)
    ),
    ("depthwise_forward", "single"): _configs((32, 32, None, 8, 1, 255), (16, 32, None, 4, 1, 255)),
    ("depthwise_data_gradients", "half"): _configs((32, None, None, 8, 1, 255), (16, None, None, 4, 1, 255)),
    ("depthwise_data_gradients", "single"): _configs((32, None, None, 8, 1, 255), (16, None, None, 4, 1, 255)),
    ("depthwise_weight_gradient", "half"): _configs(
        (32, 32, None, 4, 1, 255), (16, 32, None, 4, 1, 255), (16, 32, None, 8, 1, 255)
    ),
    ("depthwise_weight_gradient", "single"): _configs(
        (32, 32, None, 4, 1, 255), (16, 32, None, 4, 1, 255), (16, 32, None, 8, 1, 255)
    ),
}
"""The choices by kernel and by what it multiplies: 16-bit numbers, float32 as TF32, or float32 as it is.

Depthwise kernels multiply in float32 whatever they read, 16-bit numbers or single precision.
"""

MOST_SUMS = 96
"""How many registers of a thread may hold sums of depthwise weights' gradients."""


def block_in(channels: int, arithmetic: str) -> int:
    """Choose BLOCK_IN of data_gradients_kernel, from the layer alone, because the size of the workspace follows."""
    return min(32 if arithmetic == "ieee" else 64, max(16, int(triton.next_power_of_2(channels))))


def launch(kernel: str, arithmetic: str, grid: Callable[[dict[str, Any]], tuple[int, ...]], arguments: Any) -> None:
    """Run one of KERNELS with the best of its configurations, found by timing them when a layer is first seen."""
    if triton_kernels.INTERPRETED:
        KERNELS[kernel][grid](**arguments, **CONFIGS[kernel, arithmetic][-1].kwargs)
    else:
        # Fused multiply-adds: Triton means to turn them off by default.
        _tuned(kernel, arithmetic)[grid](**arguments, enable_fp_fusion=True)


@cache
def _tuned(kernel: str, arithmetic: str) -> Any:
    key = ["size_class", "stride_h", "stride_w", "KERNELS", "KH", "KW", "IN_C", "CHANNELS_LAST"]
    key += [] if kernel.startswith("depthwise") else ["GROUPS", "OUT_C", "PACK"]
    key += ["NEED_X", "NEED_ASSIGN"] if kernel.endswith("data_gradients") else []
    prune = {"early_config_prune": partial(fitting, kernel)}
    return triton.autotune(CONFIGS[kernel, arithmetic], key, prune_configs_by=prune)(KERNELS[kernel])


def fitting(kernel: str, configs: list[triton.Config], named: dict[str, Any], **arguments: Any) -> list[triton.Config]:
    """Pick the configurations worth a trial on a layer. The last and smallest always is.

    Blocks are to be no larger than the layer's channels. Tiles of contiguous maps come in through registers, which
    leaves data_gradients_kernel no room for 128 pixels. Depthwise weights have a sum for each tap of a row and kernel.
    """
    sides = [side for side in ("IN", "OUT") if f"{side}_C" in arguments]
    most = {f"BLOCK_{side}": max(16, int(triton.next_power_of_2(arguments[f"{side}_C"]))) for side in sides}
    if kernel.endswith("data_gradients") and not arguments["CHANNELS_LAST"]:
        most["BLOCK_P"] = 64

    def fits(config: triton.Config) -> bool:
        if kernel == "depthwise_weight_gradient":
            tile = config.kwargs["BLOCK_P"] * config.kwargs["BLOCK_IN"] // (32 * config.num_warps)
            return int(tile * arguments["KW"] * arguments["KERNELS"]) <= MOST_SUMS
        return all(config.kwargs.get(name, 0) <= size for name, size in most.items())

    return [config for config in configs if config is configs[-1] or fits(config)]
