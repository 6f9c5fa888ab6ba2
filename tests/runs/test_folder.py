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
