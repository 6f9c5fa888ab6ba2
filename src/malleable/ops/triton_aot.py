"""Compile the Triton kernels for a GPU that is not there, and read what the assembler says of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

TARGETS = {80: 166_912, 90: 232_448, 100: 232_448}
"""Compute capability → bytes of shared memory that one block may have there."""


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes: registers per thread, bytes spilled per thread, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def compile_for(
    capability: int, kernel: Any, config: triton.Config, dtypes: dict[str, str], constants: dict[str, Any]
) -> Usage:
    """Compile ``kernel`` as a launch with aligned tensors of ``dtypes`` (Triton's names) would on that capability.

    Arguments in neither ``dtypes`` nor ``constants`` are 32-bit integers, of which nothing is known.
    """
    constants = {**constants, **config.kwargs}
    signature = {
        name: "constexpr" if name in constants else f"*{dtypes[name]}" if name in dtypes else "i32"
        for name in kernel.arg_names
    }
    aligned: dict[Any, Any] = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in dtypes
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True},
    )
    log = _assemble(compiled.asm["ptx"], capability)
    stores, loads = (int(re.search(rf"(\d+) bytes spill {kind}", log)[1]) for kind in ("stores", "loads"))  # type: ignore[index]
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    return Usage(registers, stores + loads, compiled.metadata.shared)


def _assemble(ptx: str, capability: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={sm_arch_from_capability(capability)}"]
        command += [str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr
