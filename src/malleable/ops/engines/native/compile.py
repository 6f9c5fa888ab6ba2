"""The C++ sources become a shared library with one of these commands, on first use or for a wheel.

Whoever builds a wheel has neither PyTorch nor this package installed: this module needs Python alone.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fopenmp", "-fPIC"]

TARGETS: dict[str, dict[str, str]] = {
    "x86_64": {
        "x86-64-v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
        "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
        "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
    },
    "aarch64": {"armv8-a": "fp asimd"},
}
"""Machine → what its wheel has kernels for, worst first → what /proc/cpuinfo must list, besides all before it."""


def compile_native(compiler: list[str], path: Path) -> None:
    """Compile a library for this processor into ``path``."""
    _run([*compiler, *FLAGS, "-march=native", "-shared", *_sources(), "-o", str(path)])


def compile_portable(compiler: list[str], target: str, path: Path) -> None:
    """Compile a library for all processors of a target into ``path``, with GCC.

    It names no OpenMP library: whoever loads it provides PyTorch's, whose threads it then shares. What old systems lack
    of GCC's own library comes from the static one.
    """
    with tempfile.TemporaryDirectory() as folder:
        _run([*compiler, *FLAGS, f"-march={target}", "-c", *_sources()], folder)
        objects = map(str, sorted(Path(folder).glob("*.o")))
        _run([*compiler, "-shared", "-s", *objects, "-lgcc", "-o", str(path)])


def _sources() -> list[str]:
    return [str(source) for source in sorted(SOURCES.glob("*.cpp"))]


def _run(command: list[str], folder: str | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, errors="replace")
