"""Files that several processes write."""

import errno
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from socket import gethostname

import pytest

from helpers.runs import start
from malleable.files import (
    HOLDER,
    cache_folder,
    check_free,
    held,
    locked,
    read_json,
    remove_partial,
    whole_path,
    write_whole,
)


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with whole_path(path) as one:
        one.write_text("one")
        write_whole(path, b"two")
        assert path.read_text() == "two"
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="folders are not synchronised")
@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synchronised_is_no_error(
    number: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems may refuse it; a failing disk is another matter."""

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(number)) if fails else nullcontext():
        write_whole(tmp_path / "a.txt", b"text")
    assert (tmp_path / "a.txt").read_bytes() == b"text"


@pytest.mark.parametrize("letter", ["x", "é", "深", "😀"])
def test_names_may_be_as_long_as_the_file_system_allows(tmp_path: Path, letter: str) -> None:
    path = tmp_path / f"{letter * (251 // len(letter.encode()))}.png"
    with whole_path(path) as part:
        part.write_bytes(b"half")
        assert part.suffix == ".png"
        write_whole(path, b"other")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"half"


def test_long_names_of_killed_processes_are_removed(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 251}.png"
    with whole_path(path) as part:
        part.write_bytes(b"half")
        assert remove_partial(tmp_path) == [part]
        part.write_bytes(b"whole")
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


def test_a_folder_that_is_held_says_by_whom_and_is_not_touched(tmp_path: Path) -> None:
    with held(tmp_path):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        own = rf"in use by {gethostname()}, process {os.getpid()}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d"
        with pytest.raises(RuntimeError, match=own), held(tmp_path):
            pass
        assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert list(tmp_path.iterdir()) == []


def test_a_killed_holder_blocks_nobody_though_its_children_live(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom malleable.files import held\n"
        "with held(Path(sys.argv[1])):\n"
        "    child = os.fork()\n"
        "    if child: print(child, flush=True)\n"
        "    time.sleep(60)"
    )
    holder = start(["-c", code, str(tmp_path)])
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        holder.kill()
        holder.wait()
        assert f"process {holder.pid}" in (tmp_path / HOLDER).read_text()
        with held(tmp_path):
            assert f"process {os.getpid()}" in (tmp_path / HOLDER).read_text()
    finally:
        os.kill(child, 9)


def test_a_folder_made_for_nothing_goes_again(tmp_path: Path) -> None:
    with held(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    with held(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_without_locks_of_the_file_system_a_folder_is_held_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", refuse)
    with held(tmp_path), pytest.raises(RuntimeError, match=f"process {os.getpid()}"), held(tmp_path):
        pass
    with held(tmp_path):
        pass


@pytest.mark.skipif(not Path("/sys").is_dir(), reason="needs a file system that nobody can write to")
def test_a_folder_that_cannot_be_written_is_refused_with_a_sentence() -> None:
    with (
        pytest.raises(OSError, match=r"/sys cannot be locked \(.*\); give a folder that can be written to"),
        held(Path("/sys")),
    ):
        pass


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system that nobody can write to")
def test_a_file_that_cannot_be_written_is_refused_before_the_work() -> None:
    with pytest.raises(OSError, match=r"/proc/x.json cannot be written \(.*\); name a file in another folder.*--out"):
        check_free(Path("/proc/x.json"), overwrite=False)


def test_looking_whether_a_file_can_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    check_free(tmp_path / "x.json", overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_only_half_written_files_of_the_named_kind_are_removed(tmp_path: Path) -> None:
    mine = tmp_path / f"config.{'0a' * 16}.part.yaml"
    others = [tmp_path / f"results.{'0a' * 16}.part.json", tmp_path / "config.mine.part.yaml"]
    for path in (mine, *others):
        path.touch()
    assert remove_partial(tmp_path, "config.*") == [mine]
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_folder_made_for_nothing_goes_with_the_parents_that_were_made(tmp_path: Path) -> None:
    with held(tmp_path / "a" / "b"):
        pass
    assert list(tmp_path.iterdir()) == []
    with held(tmp_path / "a" / "b"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")
def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    monkeypatch.setenv("MALLEABLE_CACHE", "/chosen")
    assert cache_folder() == Path("/chosen")
    monkeypatch.setenv("MALLEABLE_CACHE", "~/chosen")
    assert cache_folder() == Path("/home/me/chosen")
    monkeypatch.setenv("MALLEABLE_CACHE", ".")  # a library without a folder would be looked for elsewhere
    assert cache_folder() == Path.cwd()
    monkeypatch.delenv("MALLEABLE_CACHE")
    assert cache_folder() == Path("/scratch/malleable")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/me/.cache/malleable")


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(tmp_path / "x.json") == {"a": 1}
