from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

from malleable import cli


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {verb}" in printed for verb in cli.COMMANDS)


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: malleable COMMAND" in capsys.readouterr().out


def test_a_misspelt_command_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bensh"]) == 2
    assert "unknown command 'bensh', did you mean 'bench'?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_every_command_exists(verb: str) -> None:
    assert callable(getattr(import_module(f"malleable.commands.{verb}"), verb))


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--only", "layers", "weather"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("malleable bench: only must be some of")
    assert error.count("\n") == 1


def test_an_error_without_words_is_a_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starve(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr("malleable.commands.check.splits_of", starve)
    assert cli.main(["check", "rooms"]) == 1
    assert capsys.readouterr().err == "malleable check: there is not enough memory\n"


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("malleable.commands.check.splits_of", stop)
    assert cli.main(["check", "rooms"]) == 130
    assert capsys.readouterr().err == "malleable check: stopped\n"


def test_warnings_are_one_line_without_source() -> None:
    before = warnings.formatwarning
    with cli.one_line_warnings():
        shown = warnings.formatwarning("two\nlines", UserWarning, "/elsewhere/other.py", 7, "the_source()")
    assert shown == "warning: two lines\n"
    assert warnings.formatwarning is before


def test_as_a_module() -> None:
    finished = subprocess.run([sys.executable, "-m", "malleable", "--help"], capture_output=True, text=True, check=True)
    assert "usage: malleable COMMAND" in finished.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise")
@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("--help", ""), ("cost --help", ""), ("check", ""), ("check", "1"), ("cost", "")],
)
def test_a_reader_that_has_had_enough_ends_it_quietly(words: str, unbuffered: str, tmp_path: Path) -> None:
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "train.txt").write_text("")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "malleable", *words.split(), *([str(tmp_path)] if words == "check" else [])]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    finished = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(write)
    assert finished.stderr == ""
    assert finished.returncode == 141  # as a program that SIGPIPE ended has it


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise")
def test_a_reader_of_messages_that_has_left_takes_no_output_with_it() -> None:
    """What is printed before stays printed."""
    words = """
import sys
from malleable import cli, progress
cli.run = lambda *_: (print("a result"), progress.console().print("a message"))
sys.exit(cli.main(["cost"]))
"""
    read, write = os.pipe()
    os.close(read)
    finished = subprocess.run([sys.executable, "-c", words], stdout=subprocess.PIPE, stderr=write, text=True)
    os.close(write)
    assert finished.stdout == "a result\n"
    assert finished.returncode == 141


def test_letters_that_an_output_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="cp1252"))
    assert cli.main(["cost"]) == 0
    assert b"59.468" in printed.getvalue()  # the paper's Table 1


def test_there_may_be_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["--help"]) == 0
