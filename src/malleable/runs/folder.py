"""A run's folder: begin one, or find where one stopped."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from malleable.files import remove_partial, write_whole
from malleable.models.parameters import parameter_groups
from malleable.runs.checkpoint import FOLDER, Checkpoint, newest_good, numbered
from malleable.runs.config import Config, build_network
from malleable.runs.log import METRICS
from malleable.runs.settings import read_settings

SETTINGS = "config.yaml"


_HARMLESS = {
    "data": ("workers",),
    "train": ("checkpoint_every", "validate_every", "validate_last", "log_every", "keep"),
}
"""What may change in the middle of a run without changing what it learns."""


def find_start(folder: Path, config: Config, resume: bool) -> Path | None:
    """The checkpoint that a run of ``config`` in ``folder`` goes on from, or None to start at step 0."""
    started = [name for name in (SETTINGS, METRICS, FOLDER) if (folder / name).exists()]
    if started and not resume:
        raise ValueError(
            f"{folder} already holds a run ({', '.join(started)}); add --resume auto to go on with it, or give "
            "another folder with --out"
        )
    partial = [
        *remove_partial(folder / FOLDER),
        *(part for name in (SETTINGS, METRICS) for part in remove_partial(folder, f"{Path(name).stem}.*")),
    ]
    if partial:
        warnings.warn(
            f"{', '.join(path.name for path in partial)}: the run was stopped while writing; removed", stacklevel=2
        )
    found = newest_good(folder / FOLDER, check_resumable)
    if found is not None:
        compare(found[1].config, config, folder)
    elif numbered(folder / FOLDER):
        raise ValueError(f"none of the checkpoints in {folder / FOLDER} can be read; use another out")
    elif resume:
        print(f"{folder} holds no checkpoint yet; starting at step 0", file=sys.stderr)
    return None if found is None else found[0]


def check_resumable(checkpoint: Checkpoint) -> None:
    """Raise if a run could not go on from ``checkpoint``, because it is not of the network of its own settings."""
    recipe, training = checkpoint.config.train, checkpoint.training
    with torch.device("meta"):
        net = build_network(checkpoint.config.model, len(checkpoint.classes), pretrained=False)
    for state in (checkpoint.ema, checkpoint.model):
        if state is not None:
            net.load_state_dict(state, assign=True)
    groups = parameter_groups(net, lr=recipe.lr, weight_decay=0, receptive_field_lr=1)
    optimizer = torch.optim.SGD(groups)
    optimizer.load_state_dict(training["optimizer"])
    for parameter, state in optimizer.state.items():
        momentum = state["momentum_buffer"]
        if momentum is not None and (momentum.shape != parameter.shape or not momentum.isfinite().all()):
            raise ValueError("the optimiser's state does not fit the weights or is not finite")
    if not isinstance(training["precision"], dict):
        raise ValueError("the state of the precision is missing")


def compare(before: Config, now: Config, folder: Path) -> None:
    """Refuse another network or other data under a run's weights; warn of another recipe."""
    changed = differences(before, now)
    foreign = [text for text in changed if not text.startswith("train.")]
    if foreign:
        raise ValueError(f"{folder} was started with other settings: {'; '.join(foreign)}. Use another out")
    if changed:
        warnings.warn(f"going on with another recipe: {'; '.join(changed)}", stacklevel=2)


def differences(before: Config, now: Config) -> list[str]:
    """The settings that change what a run learns, where they differ: "train.lr was 0.01 and is 0.02"."""
    old, new = essence(before).to_dict(), essence(now).to_dict()
    return [
        f"{section}.{key} was {old[section][key]!r} and is {new[section][key]!r}"
        for section in old
        for key in old[section]
        if old[section][key] != new[section][key]
    ]


def essence(config: Config) -> Config:
    """``config`` with what does not change what a run learns as it is by default."""
    settings, defaults = config.to_dict(), Config().to_dict()
    for section, keys in _HARMLESS.items():
        settings[section] |= {key: defaults[section][key] for key in keys}
    return Config.from_dict(settings)


def read_config(folder: Path) -> Config:
    """The settings that the run in ``folder`` was started with."""
    path = folder / SETTINGS
    settings = read_settings(path)
    try:
        return Config.from_dict({section: settings.get(section) for section in ("model", "data", "train")})
    except ValueError as error:
        raise ValueError(f"{path}: {error}; use the version that wrote it, or train again") from error


def write_settings(folder: Path, config: Config) -> None:
    """Make ``folder``, with the YAML that runs ``config`` again."""
    import yaml  # type: ignore[import-untyped]  # comes with jsonargparse

    values: str = yaml.safe_dump({**config.to_dict(), "out": str(folder)}, sort_keys=False)
    text = f"# malleable train --config {folder / SETTINGS} --resume auto\n{values}"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SETTINGS, text.encode())
