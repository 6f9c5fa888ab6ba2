"""The Triton engine without a GPU: its results under Triton's interpreter, its binaries compiled ahead of time."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import triton_worker
from helpers.triton_worker import Case
from malleable.functional import depth_conv2d
from malleable.ops.engines import triton as triton_engine
from malleable.ops.window import Window

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

# Shares of the largest entry. The interpreter cuts bfloat16 off instead of rounding it: two units in the last place.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}
ARITHMETIC = {"half": "float16", "tf32": "float32", "ieee": "float32", "single": "float32"}
TARGETS = (80, 90, 100)
PASSES = ("forward", "data_gradients", "weight_gradient")

Run = Callable[..., Any]


def process(interpret: str, cache: str) -> Iterator[Run]:
    """Calls functions in one other process, in which TRITON_INTERPRET is set from the start."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", interpret)
            patch.setenv("TRITON_CACHE_DIR", cache)
            pool.submit(triton_worker.start).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from process("1", str(tmp_path_factory.mktemp("interpreter")))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    yield from process("0", str(tmp_path_factory.mktemp("compiler")))


def check(errors: dict[str, float], dtype: str = "float32") -> None:
    assert all(error < TOLERANCE[dtype] for error in errors.values()), errors  # false for NaN, unlike max


CASES = {
    "contiguous": Case(size=(5, 7), kernels=3),
    "channels-last": Case(size=(5, 7), kernels=3, channels_last=True),
    "blocks of channels": Case(channels=(70, 37), size=(3, 4), kernel=(1, 2)),
    "blocks of channels-last": Case(channels=(37, 70), size=(3, 4), kernel=(2, 1), channels_last=True),
    "strided": Case(stride=(2, 2), size=(9, 8)),
    "strided, channels-last": Case(stride=(2, 3), size=(8, 9), channels_last=True),
    "strided and dilated": Case(stride=(2, 2), dilation=(2, 2), padding=(2, 2, 2, 2), size=(9, 8)),
    "stride and dilation with a common factor": Case(
        stride=(4, 6), dilation=(2, 4), padding=(3, 3, 3, 3), size=(9, 12)
    ),
    "stride beyond the kernel": Case(stride=(3, 4), kernel=(1, 2), padding=(0, 0, 0, 0), size=(7, 9)),
    "stride beyond the map": Case(stride=(9, 9), size=(2, 3)),
    "dilated": Case(dilation=(2, 1), padding=(1, 1, 2, 2)),
    "padded on one side": Case(padding=(0, 3, 2, 0), kernel=(2, 3)),
    "padded beyond the kernel": Case(padding=(3, 3, 3, 3), kernel=(2, 2), size=(2, 3)),
    "even kernel": Case(kernel=(2, 4), padding=(1, 2, 0, 1)),
    "large kernel": Case(kernel=(1, 7), padding=(3, 3, 0, 0)),
    "pointwise": Case(kernel=(1, 1), padding=(0, 0, 0, 0)),
    "one kernel": Case(kernels=1, batch=1),
    "five kernels": Case(kernels=5, kernel=(1, 2), padding=(1, 0, 0, 0)),
    "groups": Case(channels=(36, 24), groups=2, kernel=(2, 2)),
    "groups, channels-last": Case((24, 48), groups=3, kernel=(2, 2), stride=(2, 1), channels_last=True),
    "groups of several blocks": Case(channels=(140, 74), groups=2, kernels=1, kernel=(1, 1), size=(4, 5)),
    "one channel out of a group": Case(channels=(32, 2), groups=2, kernel=(1, 2)),
    "groups of 4": Case((24, 24), groups=6),
    "groups of 8, channels-last": Case((32, 32), (5, 4), groups=4, kernel=(3, 2), stride=(2, 1), channels_last=True),
    "groups of 16": Case((32, 32), (5, 6), groups=2, kernel=(1, 3), dilation=(1, 2), padding=(2, 2, 0, 0)),
    "groups of 24, channels-last": Case((48, 48), groups=2, kernel=(2, 1), kernels=4, channels_last=True),
    "groups that no pack divides": Case((15, 25), groups=5, kernel=(2, 2)),
    "two channels out of each": Case((6, 12), groups=6, kernel=(2, 2)),
    "depthwise": Case((35, 35), groups=35, kernels=3),
    "depthwise, channels-last": Case((35, 35), (3, 7), groups=35, kernels=2, stride=(1, 2), channels_last=True),
    "depthwise 5×5, strided": Case((6, 6), (7, 8), (5, 5), (2, 2), (2, 2, 2, 2), groups=6, kernels=1, batch=1),
    "depthwise 7×7, channels-last": Case(
        (5, 5), (5, 6), (7, 7), padding=(3, 3, 3, 3), groups=5, batch=1, channels_last=True
    ),
    "depthwise, dilated": Case((4, 4), (7, 5), (2, 3), (2, 3), (3, 3, 2, 2), (2, 3), groups=4, kernels=4),
    "one pixel": Case(size=(1, 1), batch=1),
    "one pixel, depthwise": Case((3, 3), (1, 1), groups=3, batch=1),
    "empty batch": Case(batch=0),
}


@needs_triton
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_output_and_gradients(interpreter: Run, case: Case) -> None:
    check(interpreter(triton_worker.errors, case))


@needs_triton
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "case", ["blocks of channels", "groups, channels-last", "groups of 4", "depthwise", "depthwise, dilated"]
)
def test_half_precision(interpreter: Run, case: str, dtype: str) -> None:
    check(interpreter(triton_worker.errors, replace(CASES[case], dtype=dtype)), dtype)


@needs_triton
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_the_gradients_asked_for(interpreter: Run, needs: tuple[bool, bool, bool]) -> None:
    check(interpreter(triton_worker.errors, Case(stride=(1, 2), groups=2, kernel=(2, 2)), needs))


@needs_triton
def test_gradients_in_a_small_workspace(interpreter: Run) -> None:
    case = Case(channels=(140, 6), groups=2, kernel=(1, 1), padding=(0, 0, 0, 0))
    check(interpreter(triton_worker.errors_in_workspace, case, 1))
    check(interpreter(triton_worker.errors_in_workspace, replace(case, channels=(70, 70), groups=70), 1))


@needs_triton
@pytest.mark.parametrize("groups", [1, 20])
def test_weight_gradient_in_splits(interpreter: Run, groups: int) -> None:
    case = Case((20, 20), size=(25, 43), kernel=(1, 1), batch=1, groups=groups)
    check(interpreter(triton_worker.errors, case, (False, True, False)))


@needs_triton
def test_operator_with_strided_views(interpreter: Run) -> None:
    check(interpreter(triton_worker.errors_of_operator))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def pairs(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel, dilation, size = pairs(1, 3), pairs(1, 3), pairs(1, 5)
    padding = (*pairs(0, 3), *pairs(0, 3))
    spans = ((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    # Enough padding below and to the right for at least one output.
    missing = [max(0, span - n - sum(p)) for span, n, p in zip(spans, size, (padding[2:], padding[:2]), strict=True)]
    padding = (padding[0], padding[1] + missing[1], padding[2], padding[3] + missing[0])
    return Case(
        (5, 3), size, kernel, pairs(1, 4), padding, dilation, kernels=2, batch=1, channels_last=draw(st.booleans())
    )


@needs_triton
@settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_any_geometry(interpreter: Run, case: Case) -> None:
    check(interpreter(triton_worker.errors, case))


@needs_triton
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_every_configuration_gives_the_same(interpreter: Run, arithmetic: str) -> None:
    dtype = ARITHMETIC[arithmetic]
    dense = Case((40, 36), (3, 4), kernel=(1, 1), padding=(0, 1, 0, 0), dtype=dtype, channels_last=True)
    narrow, depthwise = (replace(dense, channels=(24, 24), groups=groups) for groups in (6, 24))
    cases = {"": dense, "narrow": narrow, "depthwise": depthwise}
    for (kernel, of), count in interpreter(triton_worker.shipped).items():
        for number in range(count if of == arithmetic else 0):
            case = cases[triton_worker.kind(kernel)]
            check(interpreter(triton_worker.errors_with, case, kernel, arithmetic, number), dtype)


@needs_triton
def test_reasons_to_refuse(interpreter: Run) -> None:
    assert "float64" in interpreter(triton_worker.reason, "float64", 16, 1)
    assert interpreter(triton_worker.reason, "float32", 16, 2) is None
    assert interpreter(triton_worker.reason, "float32", 16, 16) is None


@needs_triton
def test_compiled_kernels_refuse_cpu_tensors(compiler: Run) -> None:
    assert "needs a CUDA tensor" in compiler(triton_worker.reason, "float32", 16, 1)


@needs_triton
def test_tuner_keeps_the_fastest_of_what_fits(compiler: Run) -> None:
    case = Case((64, 80), (9, 8), stride=(2, 1), batch=4)  # 160 outputs, as many inputs in the larger phase
    assert compiler(triton_worker.tuned, case) == [
        ("forward", 3, 64, [3 * 2, 1]),
        ("data_gradients", 2, 32, [5, 2]),
        ("weight_gradient", 2, 32, [9 * 1 * 2, 1, 1]),
    ]


@needs_triton
def test_tuner_of_depthwise_kernels(compiler: Run) -> None:
    case = Case((40, 40), (9, 8), groups=40, kernel=(7, 7), padding=(3, 3, 3, 3), kernels=3)  # 144 pixels, one unit
    assert compiler(triton_worker.tuned, case) == [
        ("depthwise_forward", 2, 16, [9 * 2, 1]),
        ("depthwise_data_gradients", 2, 16, [9, 1]),
        ("depthwise_weight_gradient", 2, 16, [7 * 2, 1]),
    ]


@needs_triton
def test_a_kernel_that_cannot_be_started_is_tried_once(interpreter: Run) -> None:
    for backward, tried in ((False, ["forward"]), (True, ["forward", "data_gradients"])):
        kernels, warnings, error = interpreter(triton_worker.fallen_back, backward)
        assert kernels == [f"depthwise_{name}" for name in tried]
        (warning,) = warnings
        assert "takes over calls such as x (2, 6, 4, 5)" in warning
        assert warning.endswith(f"depthwise_{tried[-1]} could not be started: RuntimeError: out of luck")
        assert error < TOLERANCE["float32"]


@needs_triton
def test_a_kernel_that_was_asked_for_and_cannot_be_started_is_an_error(interpreter: Run) -> None:
    said = interpreter(triton_worker.failure_when_asked_for)
    assert said == "narrow_forward could not be started: FileNotFoundError: no C compiler"


def test_cpu_tensors_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, weight, assign = torch.zeros(1, 2, 3, 3), torch.zeros(2, 2, 1, 1), torch.zeros(1, 1, 1, 3, 3)
    assert triton_engine.can_run(x, weight, assign, Window((1, 1)), 1) == "needs a CUDA tensor, got one on cpu"
    with pytest.raises(RuntimeError, match="needs a CUDA tensor"):
        depth_conv2d(x, weight, assign, engine="triton")


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, malleable
conv = malleable.MalleableConv2d(2, 3, 3)
conv(torch.rand(1, 2, 5, 5), malleable.Geometry(torch.ones(1, 1, 5, 5), 5.0)).sum().backward()
assert "malleable.ops.engines.triton.kernels" not in sys.modules
from malleable.ops.engines import triton as triton_engine
from malleable.ops.window import Window
x = torch.zeros(1, 2, 3, 3)
print(triton_engine.can_run(x, x.new_zeros(2, 2, 1, 1), x.new_zeros(1, 1, 1, 3, 3), Window((1, 1)), 1))
"""


def test_without_triton_everything_else_works() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "triton is not installed"


@needs_triton
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("kernel", PASSES)
def test_compiles_without_spills(compiler: Run, kernel: str, capability: int) -> None:
    check_binaries(compiler(triton_worker.compiled, capability, kernel, "half", [{}], True))


@needs_triton
@pytest.mark.parametrize("kernel", PASSES)
@pytest.mark.parametrize("kind", ["narrow", "depthwise"])
def test_groups_compile_without_spills(compiler: Run, kind: str, kernel: str) -> None:
    layers = triton_worker.LAYERS[kind][:1]
    check_binaries(compiler(triton_worker.compiled, 90, f"{kind}_{kernel}", "half", layers, True))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_every_configuration_compiles_without_spills(compiler: Run, arithmetic: str, capability: int) -> None:
    for kernel, of in compiler(triton_worker.shipped):
        if of == arithmetic:
            layers = triton_worker.LAYERS[triton_worker.kind(kernel)]
            check_binaries(compiler(triton_worker.compiled, capability, kernel, arithmetic, layers, False))


def check_binaries(binaries: dict[str, dict[str, Any]]) -> None:
    assert binaries
    for name, binary in binaries.items():
        assert binary["stack"] == 0, f"{name} spills registers: {binary}"
        assert binary["shared"] <= binary["limit"], f"{name} takes more shared memory than there is: {binary}"
        assert not binary["atomics"], f"{name} adds in no fixed order"
