"""What is read back from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from malleable.figures.history import curves, field_paths
from malleable.runs.log import Row, read_log

ROW = '{"step": 2, "loss": 0.5}'


@pytest.mark.parametrize("line", ['{"loss": 1}', '{"step": "2", "loss": 1}', "[1]", "3", "null", '{"step": 3, "lo'])
def test_a_line_that_is_no_row_is_not_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line}\n{ROW}\n{line}")
    assert read_log(tmp_path) == [Row(2, {"loss": 0.5})]
    assert [part.tolist() for part in curves(tmp_path)["loss"]] == [[2], [0.5]]
    assert field_paths(tmp_path) == {}


def test_a_damaged_line_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "lo\xff\xfe\n' + ROW.encode())
    assert read_log(tmp_path) == [Row(2, {"loss": 0.5})]


def test_only_numbers_are_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": "high", "lr": 0.5, "val/miou": null}')
    assert read_log(tmp_path) == [Row(2, {"lr": 0.5})]


def test_without_the_file_there_are_no_rows(tmp_path: Path) -> None:
    assert read_log(tmp_path) == []
