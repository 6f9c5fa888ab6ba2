from __future__ import annotations

import json

import numpy as np
import pytest

from helpers.files import SIZE, save
from malleable.cli import main


def test_a_correct_set_passes_with_its_counts(folder, capsys):
    root = folder()
    depth, label = np.full(SIZE, 2000, np.uint16), np.zeros(SIZE, np.uint8)
    depth[:3], label[:, :4] = 0, 255  # a quarter of each
    depth[5, 5], depth[6, 6] = 700, 3500
    label[0, 10:12] = 2
    save(depth, root / "depth/c.png")
    save(label, root / "labels/c.png")
    assert main(["check", str(root), "--split", "test"]) == 0
    out = capsys.readouterr().out
    assert "tiny/test: 1 samples, 0 errors" in out
    assert "12×16 (1)" in out
    assert "0.70 to 3.50 m, 25.0% of the pixels invalid" in out
    assert "25.0% of the pixels\n" in out
    assert "wall   98.61%" in out  # 142 of 144
    assert "thing   1.39%" in out


def test_every_split_is_walked(folder, capsys):
    assert main(["check", str(folder())]) == 0
    out = capsys.readouterr().out
    assert "tiny/train: 2 samples" in out
    assert "tiny/test: 1 samples" in out


@pytest.mark.parametrize("workers", ["1", "3"])
def test_every_error_is_named_and_the_exit_code_says_so(folder, capsys, workers):
    root = folder()
    (root / "depth/a.png").unlink()
    save(np.full(SIZE, 7, np.uint8), root / "labels/b.png")
    assert main(["check", str(root), "--workers", workers]) == 1
    out = capsys.readouterr().out
    assert "tiny/train: 2 samples, 2 errors" in out
    assert "depth/a.png is missing" in out
    assert "labels/b.png holds labels [7]" in out
    assert "tiny/test: 1 samples, 0 errors" in out


def test_an_id_in_two_splits_is_noted(folder, capsys):
    root = folder()
    (root / "splits/test.txt").write_text("b\nc\n")
    assert main(["check", str(root)]) == 0
    assert "1 ids are in both test and train, for example b" in capsys.readouterr().out


def test_a_broken_description_fails_once_per_split(folder, capsys):
    root = folder()
    description = json.loads((root / "dataset.json").read_text())
    (root / "dataset.json").write_text(json.dumps({**description, "classes": []}))
    assert main(["check", str(root)]) == 1
    assert "'classes' must be a list" in capsys.readouterr().out


def test_no_folder(tmp_path, capsys):
    assert main(["check", str(tmp_path / "nothing")]) == 1
    assert "neither a folder nor rooms, rooms:HEIGHTxWIDTH or streets" in capsys.readouterr().err


def test_progress_is_plain_lines_where_there_is_no_terminal(folder, capsys):
    main(["check", str(folder()), "--split", "train"])
    assert "tiny/train: 2/2\n" in capsys.readouterr().err
