"""Checkpoints: written whole or not at all, checked before they are believed, read without running anything."""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from malleable.config import Config
from malleable.files import whole_file, whole_path

FOLDER = "checkpoints"
BEST = "best.pt"
_NAME = re.compile(r"step-(\d+)\.pt")
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A run at one step.

    model, ema: state dicts of the network and of the moving average of its weights; ema is None if there is none.
    training: state of optimiser, schedule, precision and random numbers, for resuming.
    step: updates made so far.
    classes, palette, dataset: of the training data; palette has one (red, green, blue) per class.
    versions: of the packages that wrote it.
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


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``folder``/step-N.pt. The name appears only once every byte is on the disk."""
    path = folder / f"step-{checkpoint.step:08d}.pt"
    content = {
        "format": _FORMAT,
        "config": checkpoint.config.to_dict(),
        "step": checkpoint.step,
        "model": dict(checkpoint.model),
        "ema": None if checkpoint.ema is None else dict(checkpoint.ema),
        "classes": list(checkpoint.classes),
        "palette": [list(colour) for colour in checkpoint.palette],
        "dataset": checkpoint.dataset,
        "training": checkpoint.training,
        "versions": checkpoint.versions,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
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
    with whole_path(path.with_name(BEST)) as part:
        try:
            os.link(path, part)  # costs no space
        except OSError:  # a file system without links
            shutil.copyfile(path, part)


def prune(folder: Path, keep: int, step: int) -> None:
    """Delete all numbered checkpoints up to ``step`` but the ``keep`` newest of them."""
    for path in numbered(folder, step)[keep:]:
        path.unlink()


def numbered(folder: Path, step: int | None = None) -> list[Path]:
    """The finished checkpoints of ``folder`` but the best, newest first.

    ``step``: leave out later ones. A run that goes on from it could not read them.
    """
    found = [(int(match[1]), path) for path in folder.glob("step-*.pt") if (match := _NAME.fullmatch(path.name))]
    return [path for number, path in sorted(found, reverse=True) if step is None or number <= step]


def read_checkpoint(path: str | Path) -> Checkpoint:
    """A checkpoint from its file, or the newest good one of a ``checkpoints`` folder or a run's folder.

    Damaged ones in a folder are passed over with a warning. For the best one name the file, ``checkpoints/best.pt``.
    Nothing in the file is executed.
    """
    path = Path(path)
    if path.is_file():
        return _read(path)
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} is neither a checkpoint nor a folder that holds some")
    found = newest_good(folder)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no good checkpoint (step-N.pt)")
    return found[1]


def newest_good(folder: Path) -> tuple[Path, Checkpoint] | None:
    """The newest checkpoint of ``folder`` that can be read, the best one if no numbered one can; None without any."""
    for path in [*numbered(folder), *folder.glob(BEST)]:
        try:
            return path, _read(path)
        except ValueError as error:
            warnings.warn(f"{error}; using the one before it", stacklevel=2)
    return None


def _read(path: Path) -> Checkpoint:
    try:
        with zipfile.ZipFile(path) as archive:  # torch's files are zip archives with a checksum for every tensor
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged} does not match its checksum")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors and settings, which could run code, and was not loaded"
        ) from error
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{path} is damaged or no checkpoint ({error})") from error
    if not isinstance(content, dict) or "format" not in content:
        raise ValueError(f"{path} is no checkpoint of malleable train; it holds a {type(content).__name__}")
    if content["format"] != _FORMAT:
        raise ValueError(f"{path} has format {content['format']}; this version of malleable reads {_FORMAT}")
    try:
        return Checkpoint(
            config=Config.from_dict(content["config"]),
            step=content["step"],
            model=content["model"],
            ema=content["ema"],
            classes=tuple(content["classes"]),
            palette=_colours(content["palette"]),
            dataset=content["dataset"],
            training=content["training"],
            versions=content["versions"],
        )
    except KeyError as error:
        raise ValueError(f"{path} is no checkpoint of malleable train; it has no {error}") from error


def _colours(palette: Sequence[Sequence[int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((red, green, blue) for red, green, blue in palette)
