"""A quarter of the training images is held out once."""

import subprocess
import sys
from pathlib import Path

from helpers.runs import make_data

SCRIPT = Path(__file__).parents[2] / "studies" / "nyudv2_half" / "hold_out.py"


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(make_data(tmp_path / "tiny")), str(tmp_path / "held")]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=100) for _ in range(2))
    assert (first.returncode, first.stdout) == (0, "fit: 7 images\nhold: 0 images\n")
    assert (second.returncode, second.stdout) == (1, "")
    assert second.stderr == f"{tmp_path / 'held'} is there already; use it, or name another folder\n"
