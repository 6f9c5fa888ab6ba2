"""The libraries that wheels carry: which one is taken, and each on an emulated processor that can do nothing more."""

from __future__ import annotations

import copy
import ctypes
import logging
import platform
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import malleable as mb
from malleable.ops.engines.native import build
from malleable.ops.engines.native.compile import TARGETS, compile_portable

LEVELS = TARGETS["x86_64"]
V2, V3, V4 = (" ".join(list(LEVELS.values())[: n + 1]) for n in range(3))


class TestChoice:
    @pytest.fixture(autouse=True)
    def wheel(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        """A wheel with a library for each level, of which loading gives the path; there is no compiler."""
        for level in LEVELS:
            (tmp_path / f"{level}.so").touch()
        monkeypatch.setattr(build, "PREBUILT", tmp_path)
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setattr(ctypes, "CDLL", lambda path, mode=0: Path(path).stem)
        monkeypatch.delenv("CXX", raising=False)
        yield build.library.cache_clear()
        build.library.cache_clear()

    def taken(self, monkeypatch: pytest.MonkeyPatch, processor: str) -> object:
        monkeypatch.setattr(build, "_processor", lambda: f"flags : fpu sse {processor}")
        return build._prebuilt()

    @pytest.mark.parametrize(("processor", "level"), [(V2, "x86-64-v2"), (V3, "x86-64-v3"), (V4, "x86-64-v4")])
    def test_the_best_that_the_processor_can_run(
        self, processor: str, level: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.taken(monkeypatch, processor) == level

    def test_a_level_needs_all_before_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.taken(monkeypatch, V4.replace("bmi2", "")) == "x86-64-v2"

    def test_a_processor_that_is_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.taken(monkeypatch, "") is None

    def test_another_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
        assert self.taken(monkeypatch, V4) is None

    def test_a_compiler_that_was_asked_for_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "_processor", lambda: V4)
        monkeypatch.setenv("CXX", "my-compiler")
        assert "no C++ compiler (my-compiler)" in str(build.library())

    def test_one_that_cannot_be_loaded_is_named(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(path: str, mode: int = 0) -> object:
            raise OSError("libstdc++.so.6: cannot open")

        monkeypatch.setattr(ctypes, "CDLL", broken)
        with caplog.at_level(logging.WARNING, "malleable"):
            assert self.taken(monkeypatch, V4) is None
        assert "could not be loaded: libstdc++.so.6: cannot open" in caplog.text


EMULATORS = {
    "x86-64-v2": ["qemu-x86_64", "-cpu", "Nehalem"],
    "x86-64-v3": ["qemu-x86_64", "-cpu", "Haswell"],
    "armv8-a": ["qemu-aarch64", "-cpu", "cortex-a53", "-L", "/usr/aarch64-linux-gnu"],
}
"""Target → what emulates its smallest processor. There is none for x86-64-v4."""


class Emulated:
    """Stands for a loaded library; each call of a function is a process of an emulator."""

    def __init__(self, target: str, folder: Path) -> None:
        machine = next(machine for machine, targets in TARGETS.items() if target in targets)
        compiler = "g++" if machine == platform.machine() else f"{machine}-linux-gnu-g++"
        for needed in (compiler, EMULATORS[target][0]):
            if shutil.which(needed) is None:
                pytest.skip(f"there is no {needed}")
        self._folder, self._calls = folder, 0
        compile_portable([compiler], target, folder / "library.so")
        source = Path(__file__).parents[2] / "helpers" / "call_kernel.cpp"
        subprocess.run([compiler, "-O1", str(source), "-o", str(folder / "call"), "-ldl"], check=True)
        self._command = [*EMULATORS[target], str(folder / "call"), str(folder / "library.so")]

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> int:
            self._calls += 1
            words = [self._word(argument, self._folder / str(place)) for place, argument in enumerate(arguments)]
            subprocess.run([*self._command, function, *words], check=True)
            for place, argument in enumerate(arguments):
                if isinstance(argument, Tensor):
                    written = (self._folder / str(place)).read_bytes()
                    ctypes.memmove(argument.data_ptr(), written, len(written))
            return 0

        return call

    @staticmethod
    def _word(argument: Any, path: Path) -> str:
        """Write an argument down as call_kernel.cpp reads it."""
        if isinstance(argument, Tensor):
            storage = argument.untyped_storage()
            path.write_bytes(ctypes.string_at(storage.data_ptr(), storage.nbytes()))
            assert argument.data_ptr() == storage.data_ptr()
        elif hasattr(argument, "_obj"):  # byref(problem)
            path.write_bytes(bytes(argument._obj))
        elif argument is None:
            return "null"
        elif isinstance(argument, float):
            return f"f:{argument!r}"
        else:
            return f"i:{argument}"
        return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("target", EMULATORS)
def test_every_kernel_on_an_emulated_processor(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Layers with two threads, output and every gradient, against the plain engine in float64."""
    emulated = Emulated(target, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layers = {
        "dense": mb.MalleableConv2d(20, 40, 3, 2, 1),
        "narrow groups": mb.MalleableConv2d(24, 16, 3, 1, 1, groups=8),
        "depthwise": mb.MalleableConv2d(36, 36, 5, 1, 2, groups=36, kernels=2),
        "hard": mb.Conv25d(9, 9, 3, 1, 2, 2),
        "depth-aware": mb.DepthAwareConv2d(9, 9, 3, 1, 1),
    }
    for name, layer in layers.items():
        for dtype, tolerance in {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}.items():
            rounded = copy.deepcopy(layer).to(dtype)
            x, depth = torch.randn(2, layer.in_channels, 19, 23).to(dtype), 2 + 0.1 * torch.rand(2, 1, 38, 46)
            depth[:, :, 10:15, 20:30] = 0
            with monkeypatch.context() as context:
                context.setenv("MALLEABLE_ENGINE", "native")
                for module in ("engines.native", "malleable_conv2d", "scaled_assign", "differences"):
                    context.setattr(import_module(f"malleable.ops.{module}"), "library", lambda: emulated)
                    context.setattr(import_module(f"malleable.ops.{module}"), "pointer", lambda t: t)
                actual = results(rounded, x, depth)
            with monkeypatch.context() as context:
                context.setenv("MALLEABLE_ENGINE", "plain")
                expected = results(rounded.double(), x.double(), depth)
            for a, e in zip(actual, expected, strict=True):
                error = (a.double() - e).abs().max() / e.abs().max()
                assert error <= tolerance, (name, dtype, error)
    assert emulated._calls >= 3 * 2 * len(layers)


def results(layer: torch.nn.Module, x: Tensor, depth: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and every parameter."""
    leaves = [x.clone().requires_grad_(), *layer.parameters()]
    y = layer(leaves[0], mb.Geometry(depth, 60.0))
    return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))]
