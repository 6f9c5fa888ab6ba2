"""What a run's folder keeps of its settings."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from malleable import cli
from malleable.runs.config import Config, DataConfig
from malleable.runs.folder import SETTINGS, read_config, write_settings


@pytest.mark.parametrize("text", ["1e-4", "1e5", "5", "null", "true", "2020-01-01", "a: b", "", "rooms", "nan"])
def test_text_that_looks_like_something_else_stays_text(tmp_path: Path, text: str) -> None:
    config = replace(Config(), data=DataConfig(root=text))
    write_settings(tmp_path, config)
    assert read_config(tmp_path) == config


@pytest.mark.parametrize("name", ["x", "1e-4", "my run"])
def test_its_first_line_goes_on_with_it(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = replace(Config(), data=DataConfig(root="1e-4"))
    write_settings(Path(name), config)
    command = (Path(name) / SETTINGS).read_text().splitlines()[0].removeprefix("# malleable ")
    with patch("malleable.commands.train.fit") as fit:
        assert cli.main(shlex.split(command)) == 0
    assert (fit.call_args.args, fit.call_args.kwargs["resume"]) == ((config, name), True)


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings of a run that was begun as runs/x and renamed."""
    monkeypatch.chdir(tmp_path)
    write_settings(Path("runs/x"), Config())
    return Path("runs/x").rename("runs/my run") / SETTINGS


def test_a_run_that_was_moved_is_not_begun_anew(moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with patch("malleable.commands.train.fit") as fit:
        assert cli.main(["train", "--config", str(moved), "--resume", "auto"]) == 2
    fit.assert_not_called()
    printed = capsys.readouterr().err
    assert f"{moved} is of a run in {Path('runs/x').resolve()}, but lies in {moved.parent.resolve()}" in printed
    assert "add --out 'runs/my run' to go on with it" in printed


def test_nor_is_one_that_was_begun_in_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_settings(Path("runs/my run"), Config())
    monkeypatch.chdir("runs")
    with patch("malleable.commands.train.fit") as fit:
        assert cli.main(["train", "--config", f"my run/{SETTINGS}", "--resume", "auto"]) == 2
    fit.assert_not_called()
    assert "add --out 'my run'" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["runs/my run", "runs/x", "runs/z"])
def test_a_run_that_was_moved_goes_wherever_it_is_told(moved: Path, out: str) -> None:
    Path("z.yaml").write_text("out: runs/z\n")
    told = ["--config", "z.yaml"] if out == "runs/z" else ["--out", out]
    with patch("malleable.commands.train.fit") as fit:
        assert cli.main(["train", "--config", str(moved), *told]) == 0
    assert fit.call_args.args[1] == out


def test_settings_of_a_run_may_be_copied_under_another_name(moved: Path) -> None:
    moved.rename("mine.yaml")
    with patch("malleable.commands.train.fit") as fit:
        assert cli.main(["train", "--config", "mine.yaml"]) == 0
    assert fit.call_args.args[1] == "runs/x"
