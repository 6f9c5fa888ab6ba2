"""Compile the Triton kernels for a GPU that is not there, and read from the binary what they take."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from malleable.ops.engines.triton import pack_of
from malleable.ops.engines.triton.tuning import CONFIGS, KERNELS, block_in, fitting

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}
"""Compute capability → bytes of shared memory that one block of threads may have there."""


@dataclass(frozen=True)
class Layer:
    """What of a layer is known when its kernels are compiled."""

    channels: int = 256
    groups: int = 1
    kernels: int = 3
    kernel_size: int = 3
    strided: bool = False
    channels_last: bool = True
    assign_learned: bool = True
    half: str = "bf16"
    ones: tuple[str, ...] = ()
    """Sizes, padding or dilation that are 1: a launch makes constants of them."""


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes: registers and bytes of stack a thread, bytes of shared memory a block.

    The kernels have no arrays of their own, so a stack means that registers were spilled to it.
    """

    registers: int
    stack: int
    shared: int
    ptx: str


def compile_for(capability: int, kernel: str, arithmetic: str, config: triton.Config, layer: Layer) -> Usage:
    """Compile one of KERNELS for ``layer`` on that capability.

    Sizes, padding and dilation are taken as unknown, save for ``layer.ones``.
    """
    function = KERNELS[kernel]
    constants = constants_of(kernel, arithmetic, layer) | config.kwargs
    dtype = layer.half if arithmetic == "half" else "fp32"
    dtypes = dict.fromkeys(("x", "weight", "assign", "y", "grad", "grad_x"), dtype)
    dtypes |= {"grad_assign": "fp32", "grad_weight": "fp32"}
    names = function.arg_names
    signature = {n: "constexpr" if n in constants else f"*{dtypes[n]}" if n in dtypes else "i32" for n in names}
    aligned: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in dtypes}
    compiled = triton.compile(
        ASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "maxnreg": config.maxnreg,
            "enable_fp_fusion": True,
        },
    )
    registers, stack = _resources(compiled.asm["cubin"])
    return Usage(registers, stack, compiled.metadata.shared, compiled.asm["ptx"])


def shipped(kernel: str, arithmetic: str, layer: Layer) -> list[triton.Config]:
    """The configurations that the tuner would try on ``layer``."""
    return fitting(kernel, CONFIGS[kernel, arithmetic], {}, **constants_of(kernel, arithmetic, layer))


def constants_of(kernel: str, arithmetic: str, layer: Layer) -> dict[str, Any]:
    """What a launch on ``layer`` fixes when a kernel is compiled, the blocks apart."""
    constants: dict[str, Any] = {
        "KERNELS": layer.kernels,
        "KH": layer.kernel_size,
        "KW": layer.kernel_size,
        "CHANNELS_LAST": layer.channels_last,
    }
    if kernel.startswith("depthwise"):
        constants["IN_C"] = layer.channels
    else:
        width = layer.channels // layer.groups
        pack = pack_of(width, width, layer.groups)
        constants |= {"GROUPS": layer.groups // pack, "IN_C": pack * width, "OUT_C": pack * width, "PACK": pack}
        constants["PRECISION"] = "ieee" if arithmetic == "ieee" else "tf32"
    constants |= {name: 1 for name in layer.ones if name in KERNELS[kernel].arg_names}
    if not layer.strided:
        constants |= {"stride_h": 1, "stride_w": 1}
    if kernel.endswith("data_gradients"):
        constants |= {
            "NEED_X": True,
            "NEED_ASSIGN": layer.assign_learned,
            "BLOCK_IN": block_in(constants["IN_C"], arithmetic),
        }
        constants |= {} if layer.strided else {"step_h": 1, "step_w": 1}
    return constants


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread, from the headers of a compiled kernel."""
    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        command = [str(tool), "--dump-resource-usage", str(file)]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    if found is None:
        raise RuntimeError(f"cuobjdump names no registers: {listing}")
    return int(found[1]), int(found[2])
