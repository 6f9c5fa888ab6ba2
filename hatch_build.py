"""Hatchling puts compiled C++ kernels into a wheel if $MALLEABLE_KERNELS names the machine they are for.

Without it, as for ``pip install .``, a wheel is pure Python and no compiler is needed.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "malleable/ops/engines/native"


class Kernels(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machine = os.environ.get("MALLEABLE_KERNELS")
        if not machine or version == "editable":
            return
        commands = runpy.run_path(str(Path(self.root, "src", NATIVE, "compile.py")))
        if machine not in commands["TARGETS"]:
            raise ValueError(f"MALLEABLE_KERNELS must be one of {', '.join(commands['TARGETS'])}, got {machine}")
        compiler = "g++" if machine == platform.machine() else f"{machine}-linux-gnu-g++"
        if shutil.which(compiler) is None:
            raise FileNotFoundError(f"kernels for {machine} need {compiler}, which was not found")
        self.folder = tempfile.mkdtemp()
        for target in commands["TARGETS"][machine]:
            path = Path(self.folder, f"{target}.so")
            try:
                commands["compile_portable"]([compiler], target, path)
            except subprocess.CalledProcessError as error:
                raise RuntimeError(f"{compiler} could not build kernels for {target}:\n{error.stderr}") from error
            build_data["force_include"][str(path)] = f"{NATIVE}/prebuilt/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)
