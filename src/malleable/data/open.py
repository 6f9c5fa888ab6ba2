"""Which class reads which data set, and which splits it has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from malleable.data.cityscapes import SPLITS, Cityscapes
from malleable.data.folder import FolderDataset, split_names
from malleable.data.sample import SampleDataset
from malleable.data.synthetic import SIZE, SyntheticScenes, World

_SYNTHETIC = {"train": (0, 1000), "val": (1, 200), "test": (2, 200), "other-camera": (3, 200)}
"""Each split of a synthetic world has this seed and length."""

_OTHER_CAMERA: dict[str, Any] = {"sensor": "stereo", "zoom": 0.75}
"""What the last split is seen by: wider, by a fifth coarser, and two small cameras 5.5 cm apart in rooms."""


def open_dataset(source: str | Path, split: str, *, strict: bool = True) -> SampleDataset:
    """Open a split of ``source``: ``"rooms"``, ``"streets"``, a folder with dataset.json, or Cityscapes' tree.

    Scenes are 120 × 160; ``"rooms:72x96"`` are smaller. A folder of data in the working directory goes before a world
    of the same name. ``strict`` as for ``FolderDataset``.
    """
    root = Path(source)
    if world := _world(source):
        if split not in _SYNTHETIC:
            raise ValueError(f"split must be one of {', '.join(_SYNTHETIC)}, got {split!r}")
        seed, length = _SYNTHETIC[split]
        name, (height, width) = world
        if split != "other-camera":
            return SyntheticScenes(name, (height, width), seed, length, keep=True)
        return SyntheticScenes(name, (4 * height // 5, 4 * width // 5), seed, length, keep=True, **_OTHER_CAMERA)
    return Cityscapes(root, split) if _is_cityscapes(root) else FolderDataset(root, split, strict=strict)


def splits_of(source: str | Path) -> list[str]:
    """List the names of all splits of ``source``."""
    root = Path(source)
    if _world(source):
        return list(_SYNTHETIC)
    if _is_cityscapes(root):
        found = [split for split in SPLITS if (root / "leftImg8bit" / split).is_dir()]
        if not found:
            raise FileNotFoundError(f"{root / 'leftImg8bit'} has no folder {', '.join(SPLITS)}; is it one too deep?")
        return found
    names = split_names(root)
    if not names and not (root / "dataset.json").is_file():
        raise FileNotFoundError(f"{root} has no dataset.json, so it is no data set; name the folder that has one")
    if not names:
        raise FileNotFoundError(f"{root / 'splits'} holds no <split>.txt; write one id a line")
    return names


def _world(source: str | Path) -> tuple[World, tuple[int, int]] | None:
    """Read the name and size (height, width) of a synthetic world, None if ``source`` is none."""
    found = re.fullmatch(r"(\w+)(?::(\d+)x(\d+))?", str(source))
    holds_data = any((Path(source) / name).exists() for name in ("dataset.json", "leftImg8bit"))
    if found is None or found[1] not in get_args(World) or holds_data:
        return None
    return found[1], SIZE if found[2] is None else (int(found[2]), int(found[3]))  # type: ignore[return-value]


def _is_cityscapes(root: Path) -> bool:
    if not root.is_dir():
        worlds = " or ".join(f"{world}, {world}:HEIGHTxWIDTH" for world in get_args(World))
        raise FileNotFoundError(
            f"{root} is neither a folder nor {worlds}; docs/data.md says how a folder of data is made"
        )
    return (root / "leftImg8bit").is_dir()
