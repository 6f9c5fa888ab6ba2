"""A trained network as a folder to share: weights as safetensors, their config and a model card, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from malleable.inference.card import card
from malleable.inference.load import CARD, CONFIG, FILES, WEIGHTS, Trained
from malleable.runs.checkpoint import FOLDER
from malleable.runs.folder import SETTINGS


def share(trained: Trained, folder: Path, overwrite: bool = False, **about: Any) -> None:
    """Write a network's files into ``folder``, all of them or none; ``about`` is for :func:`~.card.card`."""
    with files_into(folder, overwrite) as temporary:
        _write(trained, temporary, about)


@contextmanager
def files_into(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Give a folder to write a network's files to; they move to ``folder`` once all are there."""
    check_folder(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        yield Path(temporary)
        folder.mkdir(exist_ok=True)
        written = {file.name for file in Path(temporary).iterdir()}
        for name in written:
            (Path(temporary) / name).replace(folder / name)
        for name in {*FILES} - written:  # of the network that was there
            (folder / name).unlink(missing_ok=True)


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise if ``folder`` cannot be written, before the work that leads to it begins."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the name of a folder")
    run = [name for name in (SETTINGS, FOLDER) if (folder / name).exists()]
    if run:  # whose own checkpoints nobody would see any more
        raise ValueError(f"{folder} is a run's folder (it holds {', '.join(run)}); give another one for the network")
    check_taken(str(folder), [name for name in FILES if (folder / name).exists()], overwrite)


def check_taken(target: str, taken: Sequence[str], overwrite: bool) -> None:
    """Raise if files that ``target`` holds would be replaced unasked."""
    if taken and not overwrite:
        raise FileExistsError(f"{target} holds {', '.join(taken)} and is left as it is; choose another or --overwrite")


def _write(trained: Trained, folder: Path, on_card: Mapping[str, Any]) -> None:
    from safetensors.torch import save_model

    about = {
        "format": "pt",
        "classes": json.dumps(list(trained.classes)),
        "palette": json.dumps([list(colour) for colour in trained.palette]),
        "dataset": json.dumps(trained.dataset),
        "step": json.dumps(trained.step),
        **({} if trained.scores is None else {"scores": json.dumps(trained.scores.to_dict())}),
    }
    save_model(trained.net, str(folder / WEIGHTS), metadata=about)
    (folder / CONFIG).write_text(json.dumps(trained.net.settings, indent=2, sort_keys=True) + "\n")
    (folder / CARD).write_text(card(trained, **on_card), encoding="utf-8")
