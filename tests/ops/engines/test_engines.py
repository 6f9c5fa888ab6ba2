"""Every engine against the plain one in float64: output and every gradient, in every dtype it claims."""

from __future__ import annotations

import logging
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from malleable.files import LOCK
from malleable.functional import depth_conv2d
from malleable.ops import engines
from malleable.ops.engines import native, plain
from malleable.ops.engines.native import build
from malleable.ops.window import Window

FAST = [name for name in engines.ENGINES if name not in ("plain", "triton")]  # test_triton.py does the same for Triton

# batch, in, out, kernels, groups, size, kernel size, stride, padding, dilation
SHAPES: dict[str, tuple[Any, ...]] = {
    "small": (1, 3, 5, 3, 1, (6, 7), 3, 1, 1, 1),
    "strided": (2, 17, 33, 2, 1, (13, 9), 3, 2, 1, 1),
    "dilated": (1, 64, 64, 3, 1, (9, 70), 3, 1, 2, 2),
    "wide": (1, 20, 130, 3, 1, (5, 5), 3, 1, 1, 1),
    "deep": (1, 300, 8, 2, 1, (4, 5), 3, 1, 1, 1),
    "even": (2, 6, 8, 5, 1, (9, 11), (2, 4), (1, 2), (0, 2), 1),
    "lopsided": (1, 6, 8, 3, 1, (9, 11), 4, 1, "same", 1),
    "pointwise": (2, 8, 8, 3, 1, (5, 6), 1, 1, 0, 1),
    "stride beyond the kernel": (1, 4, 4, 2, 1, (11, 12), 2, 3, 0, 1),
    "dense, stride beyond the kernel": (1, 18, 20, 2, 1, (11, 12), 2, 3, 0, 1),
    "grouped": (2, 12, 18, 3, 3, (7, 8), 3, 1, 1, 1),
    "grouped strided": (2, 24, 16, 3, 8, (21, 22), 3, 2, 1, 1),
    "grouped dilated": (1, 32, 32, 4, 2, (9, 19), (3, 2), (1, 3), (2, 1), (2, 3)),
    "grouped, several blocks": (1, 48, 48, 3, 2, (41, 37), 3, 1, 1, 1),
    "wide groups": (1, 70, 64, 2, 2, (5, 6), 3, 1, 1, 1),
    "depthwise": (2, 70, 70, 3, 70, (9, 10), 7, 1, 3, 1),
    "depthwise strided": (1, 20, 20, 2, 20, (11, 9), 3, 2, 1, 2),
    "depthwise 5, strided": (2, 18, 18, 3, 18, (17, 22), 5, 2, 2, 1),
    "depthwise, several blocks": (1, 37, 37, 3, 37, (45, 61), 3, 1, 1, 1),
    "depthwise, stride beyond the kernel": (1, 5, 5, 2, 5, (11, 12), 2, 3, 0, 1),
    "depthwise beyond the map": (1, 9, 9, 7, 9, (6, 7), 3, 1, 9, 9),
    "narrow groups": (1, 64, 128, 2, 16, (6, 7), 3, 1, 1, 1),
    "many groups": (1, 256, 512, 2, 256, (3, 4), 1, 1, 0, 1),
    "several blocks": (1, 8, 8, 2, 1, (21, 70), 3, 1, 1, 1),
    "beyond the map": (1, 8, 8, 2, 1, (6, 7), 3, 1, 9, 9),
    "one kernel": (1, 16, 16, 1, 1, (8, 8), 3, 1, 1, 1),
    "many kernels": (1, 4, 4, 9, 1, (6, 6), 3, 1, 1, 1),
    "no batch": (0, 4, 4, 3, 1, (6, 6), 3, 1, 1, 1),
}
THREADED = ["strided", "depthwise", "depthwise 5, strided", "grouped strided"]  # enough products for several threads
EVERY = (True, True, True)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def problem(shape: tuple[Any, ...], assignment: str, dtype: torch.dtype) -> tuple[list[Tensor], Window, int]:
    """grad, x, weight, assign; rounded to ``dtype`` but held in float64."""
    batch, channels, out, kernels, groups, size, kernel, stride, padding, dilation = shape
    window = Window.of(kernel, stride, padding, dilation)
    output = window.output_size(size)
    assign = torch.rand(batch, kernels, window.taps, *output, dtype=torch.float64)
    if assignment == "hard":
        assign = (assign == assign.amax(1, keepdim=True)).double() * (assign > 0.4)
    if assignment == "constant center":
        assign[:, :, window.center] = torch.rand(kernels, dtype=torch.float64).view(-1, 1, 1)
    tensors = [
        torch.randn(batch, out, *output, dtype=torch.float64),
        torch.randn(batch, channels, *size, dtype=torch.float64),
        torch.randn(kernels * out, channels // groups, *window.kernel_size, dtype=torch.float64),
        assign,
    ]
    return [t.to(dtype).double() for t in tensors], window, groups


def assert_near(actual: Tensor | None, expected: Tensor | None, tolerance: float, name: str) -> None:
    assert actual is not None, name
    assert expected is not None, name
    assert actual.shape == expected.shape, name
    if expected.numel():
        error = (actual.double() - expected).abs().max()
        assert error <= tolerance * expected.abs().max().clamp(min=1e-9), name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("assignment", ["soft", "hard", "constant center"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("engine", FAST)
def test_parity(engine: str, shape: str, assignment: str, dtype: torch.dtype) -> None:
    tensors, window, groups = problem(SHAPES[shape], assignment, dtype)
    low = [t.to(dtype) for t in tensors]
    run = engines.ENGINES[engine]
    if reason := run.can_run(*low[1:], window, groups):
        pytest.skip(reason)
    expected = plain.forward(*tensors[1:], window, groups)
    assert_near(run.forward(*low[1:], window, groups), expected, TOLERANCE[dtype], "output")
    expected_gradients = plain.backward(*tensors, window, groups, (True, True, True))
    gradients = run.backward(*low, window, groups, (True, True, True))
    for name, a, e in zip(("x", "weight", "assign"), gradients, expected_gradients, strict=True):
        assert_near(a, e, TOLERANCE[dtype], name)


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("shape", ["strided", "depthwise", "grouped"])
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_one_at_a_time(engine: str, shape: str, needs: tuple[bool, bool, bool]) -> None:
    tensors, window, groups = problem(SHAPES[shape], "constant center", torch.float32)
    low = [t.float() for t in tensors]
    run = engines.ENGINES[engine]
    if reason := run.can_run(*low[1:], window, groups):
        pytest.skip(reason)
    expected = plain.backward(*tensors, window, groups, needs)
    for a, e, need in zip(run.backward(*low, window, groups, needs), expected, needs, strict=True):
        assert (a is not None) == need
        if need:
            assert_near(a, e, 3e-6, "gradient")


@pytest.mark.parametrize("shape", SHAPES)
def test_no_gradient_is_left_half_written(shape: str) -> None:
    tensors, window, groups = problem(SHAPES[shape], "constant center", torch.float32)
    low = [t.float() for t in tensors]
    if reason := native.can_run(*low[1:], window, groups):
        pytest.skip(reason)
    torch.use_deterministic_algorithms(True)  # puts NaN where memory is not written
    try:
        gradients = native.backward(*low, window, groups, EVERY)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(g is not None and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("shape", THREADED)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_layouts_and_threads(engine: str, shape: str, threads: int) -> None:
    tensors, window, groups = problem(SHAPES[shape], "soft", torch.float32)
    grad, x, weight, assign = (t.float() for t in tensors)
    run = engines.ENGINES[engine]
    if reason := run.can_run(x, weight, assign, window, groups):
        pytest.skip(reason)
    exact = tensors[1:]
    expected = [plain.forward(*exact, window, groups), *plain.backward(*tensors, window, groups, EVERY)]
    repeated = tensors[0][..., :1, :1].expand_as(grad)
    expected += plain.backward(repeated, *exact, window, groups, EVERY)
    strange = torch.randn(*x.shape[:2], x.shape[2] + 2, 2 * x.shape[3])[..., 1:-1, ::2].copy_(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for layout in (x.to(memory_format=torch.channels_last), strange):
            expanded = grad[..., :1, :1].expand_as(grad)
            outputs = [run.forward(layout, weight, assign, window, groups)]
            for given in (grad, expanded):
                outputs += run.backward(given, layout, weight, assign, window, groups, EVERY)  # type: ignore[arg-type]
            for a, e in zip(outputs, expected, strict=True):
                assert_near(a, e, 3e-6, f"{layout.stride()}")
    finally:
        torch.set_num_threads(before)


def test_sums_over_many_groups_are_not_rounded_on_the_way() -> None:
    x, weight = torch.ones(1, 512, 4, 4).bfloat16(), torch.ones(2 * 1024, 1, 1, 1).bfloat16()
    assign = torch.rand(1, 2, 1, 4, 4).bfloat16().requires_grad_()
    y = depth_conv2d(x, weight, assign, groups=512)
    y.backward(torch.ones_like(y))
    assert assign.grad is not None
    assert (assign.grad == 1024).all()


def test_a_workspace_that_does_not_fit_is_an_error_not_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, assign = torch.randn(1, 64, 5, 5), torch.randn(192, 64, 1, 1), torch.rand(1, 3, 1, 5, 5)
    if reason := native.can_run(x, weight, assign, Window.of(1), 1):
        pytest.skip(reason)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2**30)  # some terabytes
    with pytest.raises(MemoryError, match="workspace of the CPU engine"):
        native.forward(x, weight, assign, Window.of(1), 1)


def test_the_fast_engine_is_the_default_on_the_cpu() -> None:
    if isinstance(build.library(), str):
        pytest.skip(str(build.library()))
    x, weight, assign = torch.randn(1, 4, 5, 5), torch.randn(12, 4, 1, 1), torch.rand(1, 3, 1, 5, 5)
    assert engines.choose("auto", x, weight, assign, Window.of(1), 1) is engines.ENGINES["native"]


@pytest.mark.parametrize("shape", THREADED)
def test_results_do_not_depend_on_the_run(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, window, groups = problem(SHAPES[shape], "soft", torch.float32)
    low = [t.float() for t in tensors]
    if reason := native.can_run(*low[1:], window, groups):
        pytest.skip(reason)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    first = native.backward(*low, window, groups, EVERY)
    for _ in range(3):
        again = native.backward(*low, window, groups, EVERY)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None and b is not None)


def test_the_weights_of_large_patches_are_packed_once() -> None:
    x, assign = torch.randn(1, 3, 32, 32), torch.rand(1, 3, 32 * 32, 1, 1)
    weight, grad, window = torch.randn(3 * 768, 3, 32, 32), torch.randn(1, 768, 1, 1), Window.of(32, 32)
    if reason := native.can_run(x, weight, assign, window, 1):
        pytest.skip(reason)
    *_, found = native.backward(grad, x, weight, assign, window, 1, (False, False, True))  # a copy a tap is 29 GB
    *_, expected = plain.backward(*(t.double() for t in (grad, x, weight, assign)), window, 1, (False, False, True))
    assert_near(found, expected, 3e-6, "assign")


class TestChoice:
    x, weight, assign = torch.randn(1, 4, 5, 5), torch.randn(12, 4, 1, 1), torch.rand(1, 3, 1, 5, 5)

    def call(self, **options: Any) -> Tensor:
        return depth_conv2d(self.x, self.weight, self.assign, **options)

    def test_environment_overrides_auto(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MALLEABLE_ENGINE", "plain")
        assert engines.choose("auto", self.x, self.weight, self.assign, Window.of(1), 1) is engines.ENGINES["plain"]
        named = engines.choose("blocks", self.x, self.weight, self.assign, Window.of(1), 1)
        assert named is engines.ENGINES["blocks"]

    def test_unknown_names_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MALLEABLE_ENGINE", "fastest")
        with pytest.raises(ValueError, match="MALLEABLE_ENGINE=fastest must be 'auto' or one of"):
            self.call()

    def test_impossible_wishes_say_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MALLEABLE_ENGINE", "native")
        with pytest.raises(RuntimeError, match=r"MALLEABLE_ENGINE=native cannot run this call: .*float64"):
            depth_conv2d(self.x.double(), self.weight.double(), self.assign)

    def test_the_choice_is_logged_once_per_shape(self, caplog: pytest.LogCaptureFixture) -> None:
        engines._log.cache_clear()
        with caplog.at_level(logging.DEBUG, "malleable"):
            self.call()
            self.call()
        assert len([r for r in caplog.records if r.getMessage().startswith("engine ")]) == 1


class TestBuild:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        monkeypatch.setenv("MALLEABLE_CACHE", str(tmp_path / "cache"))
        yield build.library.cache_clear()
        monkeypatch.undo()
        build.library.cache_clear()

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        reason = build.library()
        assert isinstance(reason, str)
        assert "no C++ compiler (no-such-compiler)" in reason
        x, weight, assign = TestChoice.x, TestChoice.weight, TestChoice.assign
        assert engines.choose("auto", x, weight, assign, Window.of(1), 1) is engines.ENGINES["blocks"]
        warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == 1

    def test_no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MALLEABLE_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", lambda _: {}["nobody"])
        reason = build.library()
        assert isinstance(reason, str)
        assert "MALLEABLE_CACHE names another place" in reason

    @pytest.fixture
    def little(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
        """Build a library of one number instead of the engine; gives the list of what was built."""
        if shutil.which("g++") is None:
            pytest.skip("there is no g++")
        builds: list[Path] = []

        def compile_little(compiler: list[str], path: Path) -> None:
            builds.append(path)
            (tmp_path / "little.cpp").write_text("int little;")
            command = [*compiler, "-shared", "-fPIC", str(tmp_path / "little.cpp"), "-o", str(path)]
            subprocess.run(command, check=True)

        monkeypatch.setenv("CXX", "g++")
        monkeypatch.setattr(build, "compile_native", compile_little)
        monkeypatch.setattr(build, "_declare", lambda _: None)
        return builds

    @pytest.mark.usefixtures("little")
    def test_a_damaged_library_is_built_again(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        damaged = tmp_path / "cache" / f"cpu-{build._fingerprint(['g++'])}.so"
        damaged.parent.mkdir()
        damaged.touch()
        assert not isinstance(build.library(), str)
        assert kept(damaged.parent) == [damaged]
        assert damaged.stat().st_size
        assert [r.getMessage().endswith("and is built again") for r in caplog.records] == [True]

    def test_who_comes_while_it_is_built_waits_for_it(self, little: list[Path]) -> None:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: build._built(), range(4)))
        assert not any(isinstance(library, str) for library in found)
        assert len(little) == 1

    def test_a_compiler_that_fails(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        script = tmp_path / "broken"
        script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "out of luck" >&2\nexit 1\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        reason = build.library()
        assert isinstance(reason, str)
        assert "out of luck" in reason
        assert not kept(tmp_path / "cache")  # nothing half built is left behind

    def test_a_compiler_that_says_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "false")
        assert "false could not build the CPU engine: Command" in str(build.library())

    def test_a_blank_name_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", " ")
        monkeypatch.setattr("shutil.which", lambda name: None)
        assert build.library() == "no C++ compiler (g++) was found"

    @pytest.mark.skipif(shutil.which("clang++") is None, reason="there is no clang++")
    @pytest.mark.slow
    def test_clang_builds_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "clang++")
        if "omp" in str(reason := build.library()):
            pytest.skip(str(reason))
        assert not isinstance(reason, str), reason
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        for shape in ("strided", "several blocks", "depthwise", "narrow groups"):
            tensors, window, groups = problem(SHAPES[shape], "constant center", torch.float32)
            low = [t.float() for t in tensors]
            expected = [plain.forward(*tensors[1:], window, groups), *plain.backward(*tensors, window, groups, EVERY)]
            actual = [native.forward(*low[1:], window, groups), *native.backward(*low, window, groups, EVERY)]
            for a, e in zip(actual, expected, strict=True):
                assert_near(a, e, 3e-6, shape)

    def test_built_once_and_announced(self, little: list[Path], caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "malleable"):
            build.library()
            build.library.cache_clear()
            build.library()
        assert len(little) == 1
        assert len([r for r in caplog.records if "building the CPU engine" in r.getMessage()]) == 1


def kept(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.name != LOCK]


@pytest.mark.parametrize("name", ["small", "strided", "even", "grouped", "depthwise"])
def test_the_kernels_of_a_center_that_all_pixels_share_act_as_one(name: str) -> None:
    (_, x, weight, assign), window, groups = problem(SHAPES[name], "soft", torch.float64)
    center = torch.rand(assign.shape[1], dtype=torch.float64)
    assign[:, :, window.center] = center.view(1, -1, 1, 1)
    expected = plain.forward(x, weight, assign, window, groups)
    torch.testing.assert_close(plain.forward(x, weight, assign, window, groups, center), expected)
