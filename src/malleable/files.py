"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PARTIAL = ".part"


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which gets the name ``path`` only when all its bytes are on the disk, and else disappears."""
    part = path.with_name(path.name + PARTIAL)
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: bytes) -> None:
    """``content`` as the file ``path``."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time is in here with ``folder``; others wait. Elsewhere than on POSIX systems none does."""
    if os.name != "posix":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Put the folder's names on the disk; elsewhere than on POSIX systems folders cannot be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
