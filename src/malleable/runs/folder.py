"""A run's folder: what it is while the run is made, and the settings that it keeps."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from zlib import crc32

from torch import Tensor

from malleable.data.sample import SampleDataset
from malleable.files import held, remove_partial, write_whole
from malleable.runs.checkpoint import (
    FOLDER,
    Checkpoint,
    all_checkpoints,
    check_finite,
    mark_best,
    newest_good,
    numbered,
    prune,
    read_checkpoint,
    write_checkpoint,
)
from malleable.runs.config import Config
from malleable.runs.log import METRICS, Log, Row, read_log, validations
from malleable.runs.scores import RESULTS, SCORES, Scores
from malleable.runs.settings import AGAIN, dumped, read_settings, written_by_run

if TYPE_CHECKING:
    from lightning_fabric import Fabric

SETTINGS = "config.yaml"

_HARMLESS = {
    "data": ("workers",),
    "train": ("checkpoint_every", "validate_every", "validate_last", "log_every", "keep"),
}
"""These may change in the middle of a run without changing what it learns."""

P = ParamSpec("P")
T = TypeVar("T")


def _on_first(method: Callable[Concatenate[RunFolder, P], T]) -> Callable[Concatenate[RunFolder, P], T]:
    """Have ``method`` work in the first process only. All get what it returns or raises, so none waits."""

    @wraps(method)
    def everywhere(self: RunFolder, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: Any = None
        error: Exception | None = None
        if self.fabric.is_global_zero:
            try:
                result = method(self, *args, **kwargs)
            except Exception as raised:  # of any kind: the others wait
                error = raised
        if self.fabric.world_size > 1:
            result, error = self.fabric.broadcast((result, error))
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    return everywhere


class RunFolder:
    """Keeps the folder of a run that is being made, which nobody else may write to meanwhile.

    All processes of ``fabric`` call the same methods in the same order; the first one alone works on the files, and
    calls ``callback`` with each row of the log.
    """

    def __init__(
        self, path: Path, fabric: Fabric, callback: Callable[[Mapping[str, float]], None] | None = None
    ) -> None:
        self.path, self.fabric, self._callback = path, fabric, callback
        self._log: Log  # in the first process, from begin on
        self._open = ExitStack()

    @_on_first
    def _hold(self) -> None:
        self._open.enter_context(held(self.path))

    def __enter__(self) -> RunFolder:
        self._hold()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @_on_first
    def started(self, resume: bool) -> bool:
        """Tell whether there are checkpoints to go on from; a run that is there without ``resume`` is an error."""
        found = [name for name in (SETTINGS, METRICS, FOLDER, RESULTS) if (self.path / name).exists()]
        if found and not resume:
            raise ValueError(
                f"{self.path} already holds a run ({', '.join(found)}); add --resume auto (resume=True in Python) to "
                "go on with it, or give another folder with --out"
            )
        patterns = (f"{FOLDER}/**/*", *(f"{Path(name).stem}.*" for name in (SETTINGS, METRICS)))
        partial = [part.name for pattern in patterns for part in remove_partial(self.path, pattern)]
        if partial:
            warnings.warn(f"{', '.join(partial)}: the run was stopped while writing; removed", stacklevel=2)
        checkpoints = all_checkpoints(self.path / FOLDER)
        if resume and not checkpoints:
            if SETTINGS in found and not written_by_run(self.path / SETTINGS):
                raise ValueError(
                    f"{self.path / SETTINGS} was not written by a run, which would replace it; keep it elsewhere, or "
                    "give another folder with --out"
                )
            if RESULTS in found or _has_saved(self.path):
                raise ValueError(
                    f"{self.path} holds the log or scores of a run, but none of its checkpoints to go on from; use "
                    "another out"
                )
            print(f"{self.path} holds no checkpoint yet; starting at step 0", file=sys.stderr)
        return bool(checkpoints)

    def restore(self, config: Config, dataset: SampleDataset, restore: Callable[[Checkpoint], None]) -> None:
        """Call ``restore`` with the newest checkpoint; if it raises with that one, with the one before it.

        A checkpoint of another network than ``config`` says, or of other data than ``dataset``, is an error.
        """
        path = self._restore_first(config, dataset, restore)
        if not self.fabric.is_global_zero:
            restore(read_checkpoint(path))

    @_on_first
    def _restore_first(self, config: Config, dataset: SampleDataset, restore: Callable[[Checkpoint], None]) -> Path:
        def restore_own(checkpoint: Checkpoint) -> None:
            if not _foreign(checkpoint, config, dataset):
                restore(checkpoint)

        found = newest_good(self.path / FOLDER, restore_own)
        if found is None:
            raise ValueError(f"none of the checkpoints in {self.path / FOLDER} can be read; use another out")
        path, checkpoint = found
        if foreign := _foreign(checkpoint, config, dataset):
            raise ValueError(f"{self.path} was started with other settings: {'; '.join(foreign)}. Use another out")
        if changed := differences(checkpoint.config, config):
            warnings.warn(f"going on with another recipe: {'; '.join(changed)}", stacklevel=2)
        return path

    @_on_first
    def begin(self, config: Config, step: int) -> None:
        """Write the settings, and open the log for what follows ``step``."""
        write_settings(self.path, config)
        self._log = self._open.enter_context(closing(Log(self.path, step, self._callback)))

    @_on_first
    def validated(self, step: int) -> bool:
        """Tell whether the log has a validation after ``step``."""
        return step in validations(read_log(self.path))

    @_on_first
    def write(self, row: Row) -> None:
        """Add ``row`` to the log."""
        self._log.write(row)

    @_on_first
    def save(self, checkpoint: Checkpoint) -> None:
        """Write ``checkpoint`` if all its weights are finite, and delete those that are older than need be kept."""
        for weights in (checkpoint.model, checkpoint.ema or {}):
            check_finite(weights, f"the network after step {checkpoint.step}")
        write_checkpoint(self.path / FOLDER, checkpoint)
        prune(self.path / FOLDER, checkpoint.config.train.keep, checkpoint.step)

    @_on_first
    def last_good(self, step: int) -> Path | None:
        """Find the newest checkpoint up to ``step`` that can be read."""
        found = newest_good(self.path / FOLDER, step=step)
        return None if found is None else found[0]

    @_on_first
    def write_validation(self, step: int, scores: Scores, images: Iterable[tuple[str, Tensor]]) -> None:
        """Add a validation to the log, and mark the checkpoint of ``step`` if no earlier one was as good.

        ``images``: (3, H, W) uint8 by name, for TensorBoard; asked for in the first process only.
        """
        for name, image in images:
            self._log.image(step, name, image)
        best = all(miou < scores.miou for miou in validations(read_log(self.path)).values())
        iou = {name: value for name, value in scores.iou.items() if value is not None}
        if best:  # before the row, without which the validation is made again
            mark_best(numbered(self.path / FOLDER, step)[0])
        self._log.write(Row(step, scores={name: getattr(scores, name) for name in SCORES}, iou=iou))


def _has_saved(folder: Path) -> bool:
    """Tell whether the log has what comes after a checkpoint: a validation, or a step beyond the first that is saved.

    That step itself is logged before it is saved, and a run may have been killed in between.
    """
    rows = read_log(folder)
    first = read_config(folder).train.checkpoint_every if rows and (folder / SETTINGS).is_file() else 0
    return bool(validations(rows)) or any(row.step > first for row in rows)


def fingerprint(dataset: SampleDataset) -> int:
    """Tell lists of samples from each other: by it and the seed a step knows what it takes."""
    return crc32("\n".join(dataset.ids).encode())


def _foreign(checkpoint: Checkpoint, config: Config, dataset: SampleDataset) -> list[str]:
    """List what keeps a run of ``config`` from going on from ``checkpoint``: another network, data or optimiser."""
    kept = ["model.", "data.", "train.optimizer "]
    before, now = checkpoint.config.train, config.train
    if 1 in (before.head_lr, now.head_lr):  # the optimiser has groups of the head if not
        kept.append("train.head_lr ")
    if 0 in (before.auxiliary, now.auxiliary):  # the optimiser has the auxiliary classifier if not
        kept.append("train.auxiliary ")
    changed = [text for text in differences(checkpoint.config, config) if text.startswith(tuple(kept))]
    if checkpoint.classes != dataset.classes:
        changed.append(f"the classes were {len(checkpoint.classes)} and are {len(dataset.classes)} others now")
    samples = checkpoint.training.get("samples")  # older ones do not tell
    if samples == fingerprint(dataset) and checkpoint.dataset == dataset.name:
        changed = [text for text in changed if not text.startswith("data.root ")]  # the same data in another place
    elif samples is not None and samples != fingerprint(dataset):
        changed.append(f"the list of samples of data.train={config.data.train} is another one now")
    return changed


def differences(before: Config, now: Config) -> list[str]:
    """List the settings that change what a run learns and differ: "train.lr was 0.01 and is 0.02"."""
    old, new = essence(before).to_dict(), essence(now).to_dict()
    return [
        f"{section}.{key} was {old[section][key]!r} and is {new[section][key]!r}"
        for section in old
        for key in old[section]
        if old[section][key] != new[section][key]
    ]


def essence(config: Config) -> Config:
    """Set all of ``config`` that does not change what a run learns to its default."""
    settings, defaults = config.to_dict(), Config().to_dict()
    for section, keys in _HARMLESS.items():
        settings[section] |= {key: defaults[section][key] for key in keys}
    return Config.from_dict(settings)


def read_config(folder: Path) -> Config:
    """Read the settings that the run in ``folder`` was started with."""
    path = folder / SETTINGS
    settings = read_settings(path)
    try:
        return Config.from_dict({section: settings.get(section) for section in ("model", "data", "train")})
    except ValueError as error:
        raise ValueError(f"{path}: {error}; use the version that wrote it, or train again") from error


def write_settings(folder: Path, config: Config) -> None:
    """Make ``folder``, with the YAML that runs ``config`` again."""
    command = ["malleable", "train", "--config", str(folder / SETTINGS), *AGAIN]
    values = dumped({**config.to_dict(), "out": str(folder)})
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SETTINGS, f"# {shlex.join(command)}\n{values}".encode())
