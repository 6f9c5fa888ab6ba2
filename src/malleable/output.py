"""Files that commands make: nothing of the user's is overwritten unless asked, and no half file is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_free(path: Path, overwrite: bool) -> None:
    """Raise if ``path`` cannot be made, before the work that leads to it begins."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} in; make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists and is left as it is; choose another name or add --overwrite")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to, which becomes ``path`` if all goes well and vanishes if not."""
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
