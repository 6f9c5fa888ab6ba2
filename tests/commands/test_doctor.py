"""The doctor finds engines that are right, says why others do not run, and finds one that is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from malleable import cli
from malleable.commands import doctor
from malleable.ops.engines import plain, triton
from malleable.ops.engines.native.build import origin
from malleable.ops.engines.triton import LaunchError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SIZE", 12)  # holes of depth included
    monkeypatch.setattr(doctor, "_LAYERS", dict(list(doctor._LAYERS.items())[:1]))


def test_all_engines_of_this_machine_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cpu", "--rounds", "1"]) == 0
    shown = capsys.readouterr()
    assert f"native engine: {origin()}" in shown.out
    assert "plain" in shown.out
    assert "blocks" in shown.out
    assert "NO" not in shown.out
    assert "not run: triton on cpu: needs a CUDA tensor" in shown.err


def test_one_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = plain.forward

    def wrong(x: Any, *rest: Any) -> Any:
        return right(x, *rest) * (1.01 if x.dtype == torch.float32 else 1)

    monkeypatch.setattr(plain, "forward", wrong)
    assert cli.main(["doctor", "--device", "cpu", "--rounds", "1"]) == 1
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if "NO" in line and "plain" in line and "float32" in line]
    assert "disagree or fail; please report this table" in shown.err


@pytest.mark.parametrize(
    "error", [LaunchError("forward could not be started: no C compiler"), RuntimeError("the kernel crashed")]
)
def test_an_engine_that_cannot_be_started_or_breaks_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: RuntimeError
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(triton, "can_run", lambda *arguments: None)
    monkeypatch.setattr(triton, "forward", fail)
    assert cli.main(["doctor", "--device", "cpu", "--rounds", "1"]) == 1
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if "triton" in line and "FAILED" in line]
    assert f"not run: triton on cpu: {error}" in shown.err


def test_gradients_that_are_no_numbers_do_not_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoilt(*arguments: Any) -> list[Tensor]:
        *results, last = run(*arguments)
        return [*results, last * math.nan if arguments[3] == "plain" and arguments[2] == torch.float32 else last]

    run = doctor._run
    monkeypatch.setattr(doctor, "_run", spoilt)
    assert cli.main(["doctor", "--device", "cpu", "--rounds", "1"]) == 1
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if "NO" in line and "plain" in line and "nan" in line]


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--device", "cuda:77"]) == 1
    assert "device must be auto, cpu, cuda or cuda:N" in capsys.readouterr().err
