"""Checkpoints: written whole or not at all, checked before they are believed, read without running anything."""

from __future__ import annotations

import errno
import os
import re
import shutil
import textwrap
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from types import NoneType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from malleable.files import whole_file, whole_path
from malleable.runs.config import Config

FOLDER = "checkpoints"
BEST = "best.pt"
_NAME = re.compile(r"step-(\d+)\.pt")
_FORMAT = 1
_MISFIT = (ValueError, TypeError, LookupError, AttributeError)  # RuntimeErrors, as without memory, are the machine's
_PARTS: dict[str, tuple[type, ...]] = {
    "config": (dict,),
    "step": (int,),
    "model": (dict,),
    "ema": (dict, NoneType),
    "classes": (list,),
    "palette": (list,),
    "dataset": (str,),
    "training": (dict,),
    "versions": (dict,),
    "places": (list,),
}


@dataclass(frozen=True)
class Checkpoint:
    """Holds a run at one step.

    model, ema: state dicts of the network and of the moving average of its weights; ema is None if there is none.
    training: state of optimiser and precision, for resuming.
    step: updates made so far.
    classes, palette, dataset: of the training data; palette has one (red, green, blue) per class.
    versions: of the packages that wrote it.
    places: names of the layers that conversion placed, whatever its rule finds by now; empty where the settings say it.
    """

    config: Config
    step: int
    model: Mapping[str, Tensor]
    ema: Mapping[str, Tensor] | None
    classes: tuple[str, ...]
    palette: tuple[tuple[int, int, int], ...]
    dataset: str
    training: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    places: tuple[str, ...] = ()


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``folder``/step-N.pt. The name appears only once every byte is on the disk."""
    path = folder / f"step-{checkpoint.step:08d}.pt"
    content = {
        "format": _FORMAT,
        **vars(checkpoint),
        "config": checkpoint.config.to_dict(),
        "model": dict(checkpoint.model),
        "ema": None if checkpoint.ema is None else dict(checkpoint.ema),
        "classes": list(checkpoint.classes),
        "palette": [list(colour) for colour in checkpoint.palette],
        "places": list(checkpoint.places),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _make_way(path)
        with whole_file(path) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
        raise _explained(error, path) from error
    return path


def _explained(error: Exception, path: Path) -> OSError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return OSError(
            f"no space left for the checkpoint {path}; earlier ones are kept. Make room, then run the same command "
            "with --resume auto"
        )
    return OSError(f"cannot write the checkpoint {path}: {error}; earlier ones are kept")


def mark_best(path: Path) -> None:
    """Have best.pt be the checkpoint ``path``, also after that one is pruned."""
    _make_way(path.with_name(BEST))
    with whole_path(path.with_name(BEST)) as part:
        try:
            os.link(path, part)  # costs no space
        except OSError:  # a file system without links
            shutil.copyfile(path, part)


def _make_way(path: Path) -> None:
    """Move a folder that has a checkpoint's name aside: no file can take its place."""
    if path.is_dir() and not path.is_symlink():
        aside = path.with_name(f"{path.name}.{uuid4().hex[:8]}")
        path.rename(aside)
        warnings.warn(f"{path} was a folder, and is {aside.name} now", stacklevel=3)


def prune(folder: Path, keep: int, step: int) -> None:
    """Delete all numbered checkpoints up to ``step`` but the ``keep`` newest of them."""
    for path in numbered(folder, step)[keep:]:
        if not path.is_dir():
            with suppress(OSError):  # on Windows while somebody reads it; the next time it goes
                path.unlink()


def numbered(folder: Path, step: int | None = None) -> list[Path]:
    """List the finished checkpoints of ``folder`` but the best, newest first.

    ``step``: leave out later ones. A run that goes on from it could not read them.
    """
    found = [(int(match[1]), path) for path in folder.glob("step-*.pt") if (match := _NAME.fullmatch(path.name))]
    return [path for number, path in sorted(found, reverse=True) if step is None or number <= step]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint from its file, or the newest good one of a ``checkpoints`` folder or a run's folder.

    Damaged ones in a folder are passed over with a warning. For the best one name the file, ``checkpoints/best.pt``.
    Nothing in the file is executed. Weights that are not finite are an error.
    """
    path = Path(path)
    if path.is_file():
        with _damage_named(path):
            return _parsed(path)
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} is neither a checkpoint nor a folder that holds some")
    found = newest_good(folder)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no good checkpoint (step-N.pt)")
    return found[1]


def all_checkpoints(folder: Path, step: int | None = None) -> list[Path]:
    """List the :func:`numbered` checkpoints of ``folder``, and after them the best one."""
    return [*numbered(folder, step), *folder.glob(BEST)]


def newest_good(
    folder: Path, use: Callable[[Checkpoint], None] | None = None, step: int | None = None
) -> tuple[Path, Checkpoint] | None:
    """Read the newest checkpoint of ``folder`` that is good, the best one if no numbered one is; None without any.

    ``use`` is called with each that can be read; one that it calls unfit, say by a ValueError, will not do either.
    Those after ``step`` are left out.
    """
    for path in all_checkpoints(folder, step):
        try:
            with _damage_named(path):
                checkpoint = _parsed(path)
            if use is not None:
                with _damage_named(path, _MISFIT):
                    use(checkpoint)
        except ValueError as error:
            warnings.warn(f"{error}; using the one before it", stacklevel=2)
        else:
            return path, checkpoint
    return None


def check_finite(weights: Mapping[str, Tensor], where: object) -> None:
    """Raise if any of ``weights`` is not finite. ``where`` names them."""
    bad = [name for name, tensor in weights.items() if not tensor.isfinite().all()]  # whole numbers always are
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ValueError(f"{where} has weights that are not finite ({bad[0]}{more})")


@contextmanager
def _damage_named(path: Path, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Turn errors of ``kinds`` into a ValueError that names ``path``; a damaged file may cause any kind."""
    try:
        yield
    except kinds as error:
        reason = " ".join(str(error).split())
        if isinstance(error, ValueError) and reason.startswith(str(path)):
            raise
        reason = textwrap.shorten(f"{type(error).__name__}: {reason}", 200, placeholder=" …")
        raise ValueError(f"{path} is damaged or no checkpoint ({reason})") from error


def _content(path: Path) -> Any:
    """Read what the file holds: tensors and plain values."""
    if not path.is_file():  # reading a pipe would wait for ever
        raise ValueError(f"{path} is no file that can be read")
    with zipfile.ZipFile(path) as archive:  # torch's files are zip archives with a checksum for every tensor
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise zipfile.BadZipFile("its parts are said to be larger than all of it")
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged} does not match its checksum")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and settings, which could run code, and was not loaded"
        ) from error


def _parsed(path: Path) -> Checkpoint:
    """Read the checkpoint in a file, and raise unless each part of it is what it should be."""
    content = _content(path)
    if isinstance(content, dict):
        content.setdefault("places", [])  # older ones do not name them
    if isinstance(content, dict) and content.get("format", _FORMAT) != _FORMAT:
        raise ValueError(f"{path} has format {content['format']}; this version of malleable reads {_FORMAT}")
    if problem := _problem(content):
        raise ValueError(f"{path} is no checkpoint of malleable train; {problem}")
    for weights in (content["model"], content["ema"] or {}):
        for name, tensor in weights.items():
            if tensor.numel() * tensor.element_size() > path.stat().st_size:
                raise ValueError(f"{path} is damaged: {name} is said to be larger than the file")
        check_finite(weights, path)
    parts = {name: content[name] for name in _PARTS}
    parts["config"] = Config.from_dict(content["config"])
    parts["classes"], parts["places"] = tuple(content["classes"]), tuple(content["places"])
    parts["palette"] = tuple((red, green, blue) for red, green, blue in content["palette"])
    return Checkpoint(**parts)


def _problem(content: Any) -> str | None:
    """Say what keeps ``content`` from being a checkpoint; None if nothing does."""
    if not isinstance(content, dict) or "format" not in content:
        return f"it holds a {type(content).__name__}"
    for name, kinds in _PARTS.items():
        if name not in content:
            return f"it has no {name!r}"
        if not isinstance(content[name], kinds) or isinstance(content[name], bool):
            return f"{name!r} is {type(content[name]).__name__}"
    for name in ("model", "ema"):
        for key, tensor in (content[name] or {}).items():
            if not isinstance(key, str) or not isinstance(tensor, Tensor):
                return f"{name!r} has a {type(tensor).__name__}"
    if content["step"] < 0 or not all(isinstance(name, str) for name in content["classes"] + content["places"]):
        return "'step', 'classes' or 'places' make no sense"
    return None
