"""Files that are either whole or not there, and take no other file's place unasked."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import uuid4

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from platformdirs import user_cache_path

LOCK = ".lock"
HOLDER = ".holder"
_PATIENCE = 1.0  # seconds: who has just taken the lock has said so by then
_LONGEST = 255  # bytes of a name, on all common file systems
_PARTIAL = re.compile(r".+\.[0-9a-f]{32}\.part(\.[^.]+)?")


def cache_folder() -> Path:
    """Return where what can be made again is kept: $MALLEABLE_CACHE, else malleable/ in the user's cache folder."""
    chosen = os.environ.get("MALLEABLE_CACHE")
    # Without a home folder older platformdirs leave a ~ in the path, which expanduser refuses.
    return Path(chosen or user_cache_path("malleable", appauthor=False)).expanduser().absolute()


def check_free(path: Path, overwrite: bool) -> None:
    """Raise if ``path`` cannot be made, before the work that leads to it begins."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} in; make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists and is left as it is; choose another name or add --overwrite")
    try:
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error}); name a file in another folder, as with --out") from error


def require_file(path: Path) -> None:
    """Raise unless ``path`` is a regular file: to read a pipe or a device may never end."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a regular file; only those are read, no folders, pipes or devices")


@contextmanager
def whole_path(path: Path, sync: bool = True) -> Iterator[Path]:
    """Give a name beside ``path`` to write to, which becomes ``path`` once all its bytes are on the disk, or vanishes.

    Without ``sync`` the disk is not waited for: faster for many files, which a power cut may then leave empty.
    """
    own = uuid4().hex  # another process may be writing the same file
    ending = f".{own}.part{path.suffix}"  # some libraries go by the suffix
    stem = os.fsencode(path.stem)[: _LONGEST - len(os.fsencode(ending))].decode(errors="ignore")
    part = path.with_name(stem + ending)
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
    """Do as :func:`whole_path`, but give the file itself, open for writing."""
    with whole_path(path, sync) as part, open(part, "wb") as file:
        yield file


def write_whole(path: Path, content: bytes, sync: bool = True) -> None:
    """Write ``content`` as the file ``path``; ``sync`` is that of :func:`whole_path`."""
    with whole_file(path, sync) as file:
        file.write(content)


def remove_partial(folder: Path, pattern: str = "**/*") -> list[Path]:
    """Delete what killed processes left half-written in ``folder`` and below, and say which files those were.

    ``pattern``: only where it fits, as for ``Path.glob``.
    """
    parts = sorted(path for path in folder.glob(f"{pattern}.part*") if _PARTIAL.fullmatch(path.name) and path.is_file())
    for part in parts:
        part.unlink()
    return parts


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let only one process at a time in here with ``folder``; others wait.

    The lock is a file in ``folder``, because on a network file system machines see each other's locks of files, but
    not of folders. It ends with the process that holds it, however that ends.
    """
    lock = _acquired(folder, timeout=-1)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep ``folder``, made if need be, for this process alone meanwhile; others are told whose it is, and fail.

    Empty folders that were made for it go with it.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, but {folder} is a file")
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquired(folder, _PATIENCE)
    except Timeout:
        raise RuntimeError(
            f"{folder} is in use by {_holder(folder)}; let it end, or give another folder with --out"
        ) from None
    except OSError as error:
        raise OSError(f"{folder} cannot be locked ({error}); give a folder that can be written to") from error
    try:
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        write_whole(folder / HOLDER, f"{gethostname()}, process {os.getpid()}, since {since}\n".encode(), sync=False)
        yield
    finally:
        for name in (HOLDER, LOCK):  # while it is still ours: who waits for a lock that is gone takes a new one
            with suppress(OSError):
                (folder / name).unlink()
        lock.release()
        for place in made:
            with suppress(OSError):  # it holds something now
                place.rmdir()


def _acquired(folder: Path, timeout: float) -> BaseFileLock:
    lock: BaseFileLock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout)
    except Timeout:
        raise
    except (OSError, NotImplementedError):  # a file system without locks: a file that is there or not serves instead
        lock = SoftFileLock(folder / f"{LOCK}.soft")
        lock.acquire(timeout)
    return lock


def _holder(folder: Path) -> str:
    """Read what the process that holds ``folder`` wrote about itself."""
    try:
        return (folder / HOLDER).read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"


def sync_folder(folder: Path) -> None:
    """Put the folder's names on the disk; elsewhere than on POSIX systems folders cannot be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing for folders
                raise
        finally:
            os.close(descriptor)


@contextmanager
def error_in(path: Path) -> Iterator[None]:
    """Put ``path`` before what a ValueError that is raised in here says."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    require_file(path)
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(entries).__name__}")
    return entries
