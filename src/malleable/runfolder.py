"""A run's folder: begin one, or find where one stopped."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from malleable.checkpoint import FOLDER, newest_good, numbered, remove_partial
from malleable.config import Config
from malleable.files import write_whole
from malleable.journal import METRICS

SETTINGS = "config.yaml"


def begin(folder: Path, config: Config, resume: bool) -> Path | None:
    """Make ``folder`` ready for a run of ``config``; the checkpoint to go on from, or None to start at step 0."""
    started = [name for name in (SETTINGS, METRICS, FOLDER) if (folder / name).exists()]
    if started and not resume:
        raise ValueError(
            f"{folder} already holds a run ({', '.join(started)}); add --resume auto to go on with it, or give "
            "another folder with --out"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, but {folder} is a file")
    partial = remove_partial(folder / FOLDER)
    if partial:
        warnings.warn(
            f"{', '.join(path.name for path in partial)}: the run was stopped while writing; removed", stacklevel=2
        )
    found = newest_good(folder / FOLDER)
    if found is not None:
        compare(found[1].config, config, folder)
    elif numbered(folder / FOLDER):
        raise ValueError(f"none of the checkpoints in {folder / FOLDER} can be read; use another out")
    elif resume:
        print(f"{folder} holds no checkpoint yet; starting at step 0", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SETTINGS, settings_text(config, folder).encode())
    return None if found is None else found[0]


def compare(before: Config, now: Config, folder: Path) -> None:
    """Refuse another network or other data under a run's weights; warn of another recipe."""
    old, new = before.to_dict(), now.to_dict()
    changed = [
        f"{section}.{key} was {old[section][key]!r} and is {new[section][key]!r}"
        for section in old
        for key in old[section]
        if old[section][key] != new[section][key] and (section, key) != ("data", "workers")
    ]
    foreign = [text for text in changed if not text.startswith("train.")]
    if foreign:
        raise ValueError(f"{folder} was started with other settings: {'; '.join(foreign)}. Use another out")
    if changed:
        warnings.warn(f"going on with another recipe: {'; '.join(changed)}", stacklevel=2)


def settings_text(config: Config, folder: Path) -> str:
    """YAML that runs ``config`` again."""
    import yaml  # type: ignore[import-untyped]  # comes with jsonargparse

    values: str = yaml.safe_dump({**config.to_dict(), "out": str(folder)}, sort_keys=False)
    return f"# malleable train --config {folder / SETTINGS} --resume auto\n{values}"
