"""Files that are either whole or not there, and take no other file's place unasked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

LOCK = ".lock"
_PARTIAL = re.compile(r".+\.[0-9a-f]{32}\.part(\.[^.]+)?")


def check_free(path: Path, overwrite: bool) -> None:
    """Raise if ``path`` cannot be made, before the work that leads to it begins."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} in; make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists and is left as it is; choose another name or add --overwrite")


@contextmanager
def whole_path(path: Path, sync: bool = True) -> Iterator[Path]:
    """A name beside ``path`` to write to, which becomes ``path`` once all its bytes are on the disk, or vanishes.

    Without ``sync`` the disk is not waited for: faster for many files, which a power cut may then leave empty.
    """
    own = uuid4().hex  # another process may be writing the same file
    part = path.with_name(f"{path.stem}.{own}.part{path.suffix}")  # some libraries go by the suffix
    try:
        yield part
        if sync:
            with open(part, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
        if sync:
            sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def whole_file(path: Path, sync: bool = True) -> Iterator[IO[bytes]]:
    """As :func:`whole_path`, but the file itself, open for writing."""
    with whole_path(path, sync) as part, open(part, "wb") as file:
        yield file


def write_whole(path: Path, content: bytes, sync: bool = True) -> None:
    """``content`` as the file ``path``; ``sync`` as for :func:`whole_path`."""
    with whole_file(path, sync) as file:
        file.write(content)


def remove_partial(folder: Path) -> list[Path]:
    """Delete what killed processes left half-written in ``folder`` and below, and say which files those were."""
    parts = sorted(path for path in folder.rglob("*.part*") if _PARTIAL.fullmatch(path.name) and path.is_file())
    for part in parts:
        part.unlink()
    return parts


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time is in here with ``folder``; others wait.

    None waits elsewhere than on POSIX systems, or on a file system without locks. The lock is a file in ``folder``,
    because on a network file system machines see each other's locks of files, but not of folders.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    with open(folder / LOCK, "ab") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sync_folder(folder: Path) -> None:
    """Put the folder's names on the disk; elsewhere than on POSIX systems folders cannot be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
