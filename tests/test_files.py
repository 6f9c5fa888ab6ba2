"""Files that several processes write."""

import subprocess
from pathlib import Path

import pytest

from malleable.files import locked, whole_path, write_whole
from runs import start


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with whole_path(path) as one:
        one.write_text("one")
        write_whole(path, b"two")
        assert path.read_text() == "two"
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_only_one_process_at_a_time_is_in_a_locked_folder(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom malleable.files import locked\n"
        "folder = Path(sys.argv[1])\nprint('here', flush=True)\n"
        "with locked(folder): (folder / 'done').touch()"
    )
    with locked(tmp_path):
        other = start(["-c", code, str(tmp_path)])
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(1)
        assert not (tmp_path / "done").exists()
    assert other.communicate(timeout=60) == ("", "")
    assert (tmp_path / "done").exists()
