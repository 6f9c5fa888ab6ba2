"""The layout of every prepared or private data set: dataset.json, splits/, images/, depth/, labels/, cameras/."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from malleable.camera import Camera, to_metres
from malleable.data.image_files import read_counts, read_indices, read_metres, read_rgb
from malleable.data.palette import Colour, check_palette, default_palette
from malleable.data.sample import Sample, SampleDataset
from malleable.data.tv_tensors import IGNORE
from malleable.files import error_in, read_json, require_file

IMAGE_SUFFIXES = (".jpg", ".png", ".jpeg")

DEPTH_SUFFIXES = (".png", ".npy", ".jpg", ".jpeg")
"""The first of these that exists is the depth file; JPEG is there only to be refused by its name."""

# Control characters, all line breaks, and what no UTF-8 file gives back.
_NOT_IN_A_LINE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")

# A median depth outside these bounds, in metres, means a wrong unit: no such scene is an RGB-D camera's.
_NEAREST_MEDIAN, _FARTHEST_MEDIAN = 0.02, 1000.0

MOST_COUNTS = 65535
"""A 16-bit depth file holds no larger number."""

# Units in which a median within these bounds can be written.
_FINEST, _COARSEST = _NEAREST_MEDIAN / MOST_COUNTS, _FARTHEST_MEDIAN


@dataclass(frozen=True)
class Description:
    """Holds what ``dataset.json`` says."""

    name: str
    classes: tuple[str, ...]
    palette: tuple[Colour, ...]
    ignore: int
    metres_per_count: float
    invalid_depth: int
    camera: Camera | None

    @classmethod
    def read(cls, path: Path) -> Description:
        """Read the description in a file."""
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing; docs/data.md shows what a data set's folder holds")
        entries = read_json(path)
        with error_in(path):
            return cls.of(entries, default_name=path.parent.name)

    @classmethod
    def of(cls, entries: Mapping[str, Any], default_name: str) -> Description:
        """Check what dataset.json holds, and make a description of it."""
        classes = entries.get("classes")
        if not isinstance(classes, list) or not classes or not all(isinstance(c, str) for c in classes):
            raise ValueError(f"'classes' must be a list of names, got {classes!r}")
        twice = [name for name in classes if classes.count(name) > 1]
        if twice:
            raise ValueError(f"'classes' must have different names, got {twice[0]!r} {len(twice)} times")
        if len(classes) > IGNORE:
            raise ValueError(f"'classes' can hold at most {IGNORE} names, got {len(classes)}")
        unit = entries.get("metres_per_count")
        if isinstance(unit, bool) or not isinstance(unit, (int, float)) or not _FINEST <= unit <= _COARSEST:
            raise ValueError(
                f"'metres_per_count' must be a positive number, 0.001 for millimetres, and from {_FINEST:.1g} to "
                f"{_COARSEST:g}, got {unit!r}"
            )
        ignore, invalid = entries.get("ignore", IGNORE), entries.get("invalid_depth", 0)
        for key, value, most in (("ignore", ignore, 255), ("invalid_depth", invalid, MOST_COUNTS)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise ValueError(f"{key!r} must be a whole number of 0 to {most}, got {value!r}")
        if ignore < len(classes):
            raise ValueError(f"'ignore' must not be the index of a class, got {ignore} ({classes[ignore]!r})")
        palette, camera = entries.get("palette"), entries.get("camera")
        if camera is not None and not isinstance(camera, Mapping):
            raise ValueError(f"'camera' must hold width, height, fx, fy, cx, cy, got {camera!r}")
        return cls(
            name=str(entries.get("name", default_name)),
            classes=tuple(classes),
            palette=default_palette(len(classes)) if palette is None else check_palette(palette, len(classes)),
            ignore=ignore,
            metres_per_count=float(unit),
            invalid_depth=invalid,
            camera=None if camera is None else Camera.from_dict(camera),
        )


class FolderDataset(SampleDataset):
    """Reads one split of a data set in the layout of docs/data.md.

    Args:
        root: the folder that holds ``dataset.json``.
        split: the name of a file ``splits/<split>.txt``, one id a line.
        strict: look for every file of the split at once, and raise if any is missing.

    Without a folder ``labels/`` the data set has no labels: every label is 255.
    """

    def __init__(self, root: str | Path, split: str, *, strict: bool = True) -> None:
        self.root, self.split = Path(root), split
        self.description = Description.read(self.root / "dataset.json")
        about = self.description
        self.name, self.classes, self.palette = about.name, about.classes, about.palette
        self.ids = _read_ids(self.root, split)
        self.labelled = (self.root / "labels").is_dir()
        self._class_of = torch.full((256,), -1)
        self._class_of[: len(self.classes)] = torch.arange(len(self.classes))
        self._class_of[self.description.ignore] = IGNORE
        if strict:
            self._require_files()

    def __getitem__(self, index: int) -> Sample:
        id = self.ids[index]
        image_path, depth_path, label_path = self._paths(id)
        image = read_rgb(image_path)
        camera = self._camera(id)
        size = tuple(image.shape[-2:])
        if camera.size != size:
            raise ValueError(
                f"{image_path} is {_text(size)} but its camera is for {_text(camera.size)}; give the camera of that "
                f"size in {self._camera_path(id)} or in dataset.json"
            )
        about = self.description
        unit, invalid = (about.metres_per_count, about.invalid_depth) if depth_path.suffix != ".npy" else (1.0, 0)
        depth = read_depth(depth_path, size, unit, invalid)
        label = self._label(label_path, size) if self.labelled else torch.full(size, IGNORE)
        return Sample(image, depth[None], label, camera, id)

    def _paths(self, id: str) -> tuple[Path, Path, Path]:
        candidates = [self.root / "images" / f"{id}{suffix}" for suffix in IMAGE_SUFFIXES]
        image = next((path for path in candidates if os.path.exists(path)), candidates[0])  # a name may be too long
        return image, depth_file(self.root / "depth" / id), self.root / "labels" / f"{id}.png"

    def _require_files(self) -> None:
        missing = [
            path for id in self.ids for path in self._paths(id)[: 3 if self.labelled else 2] if not path.exists()
        ]
        if missing:
            names = ", ".join(str(path) for path in missing[:3]) + (", …" if len(missing) > 3 else "")
            raise FileNotFoundError(
                f"{len(missing)} files of split {self.split!r} are missing: {names}; add them or take their ids out of "
                f"{self.root / 'splits' / self.split}.txt"
            )

    def _camera_path(self, id: str) -> Path:
        return self.root / "cameras" / f"{id}.json"

    def _camera(self, id: str) -> Camera:
        path = self._camera_path(id)
        if not os.path.exists(path):  # a name may be too long
            if self.description.camera is None:
                raise ValueError(f"{id} has no camera: add one to {self.root / 'dataset.json'} or write {path}")
            return self.description.camera
        return read_camera(path)

    def _label(self, path: Path, size: tuple[int, ...]) -> Tensor:
        raw = read_indices(path)
        _require_size(path, raw.shape, size)
        label = self._class_of[torch.from_numpy(raw.astype(np.int64))]
        if label.min() < 0:
            unknown = sorted(set(raw[(label < 0).numpy()].tolist()))
            raise ValueError(
                f"{path} holds labels {unknown[:8]}, outside the {len(self.classes)} classes of dataset.json and not "
                f"'ignore' ({self.description.ignore}); class indices start at 0"
            )
        return label


def read_camera(path: Path) -> Camera:
    """Read the camera in a JSON file of width, height, fx, fy, cx, cy."""
    entries = read_json(path)
    with error_in(path):
        return Camera.from_dict(entries)


def depth_file(stem: Path) -> Path:
    """Find the depth file ``stem`` with the suffix that it has, in lower or upper case, .png if there is none."""
    suffixes = [*DEPTH_SUFFIXES, *(suffix.upper() for suffix in DEPTH_SUFFIXES)]
    files = [stem.with_name(stem.name + suffix) for suffix in suffixes]
    return next((file for file in files if os.path.exists(file)), files[0])  # a name may be too long


def read_depth(path: Path, size: tuple[int, ...], metres_per_count: float | None, invalid: int = 0) -> Tensor:
    """Read depth (H, W) in float32 metres, 0 where the file says ``invalid``. ``size`` is that of its image.

    The file is a 16-bit PNG, or a ``.npy`` of floating point numbers, of which "one count" is 1. With None for
    ``metres_per_count`` the depths are in a unit that nobody knows.
    """
    counts = read_metres(path) if path.suffix.lower() == ".npy" else read_counts(path)
    _require_size(path, tuple(counts.shape), size)
    depth = to_metres(counts, metres_per_count or 1.0)
    depth[counts == invalid] = 0
    if metres_per_count is None:
        return depth
    seen = depth[::4, ::4]
    seen = seen[seen > 0]
    median = float(seen.median()) if len(seen) else 1.0
    if not _NEAREST_MEDIAN < median < _FARTHEST_MEDIAN:
        raise ValueError(
            f"{path}: half of the depths are {'below' if median < 1 else 'beyond'} {median:g} m, which looks like a "
            f"wrong unit; one count is taken for {metres_per_count:g} m (metres_per_count), 0.001 is right for "
            "millimetres"
        )
    return depth


def split_names(root: Path) -> list[str]:
    """List the splits of a data set's folder, sorted."""
    return sorted(path.stem for path in (root / "splits").glob("*.txt"))


def check_id(id: str, what: str = "id") -> None:
    """Raise unless ``id`` can name files of a data set, in folders or not, and fill one line of a split's file."""
    parts = id.split("/")
    if ".." in parts or id.startswith("/") or "\\" in id or PureWindowsPath(id).drive:
        raise ValueError(f"{what} {id!r} points outside of the data set; write it like 'kitchen/0001'")
    if "" in parts or "." in parts or id != id.strip() or _NOT_IN_A_LINE.search(id):
        raise ValueError(
            f"{what} {id!r} cannot name a file; write it like 'kitchen/0001', without empty parts, line breaks or "
            "spaces around it"
        )


def check_split(ids: Sequence[str], where: str) -> None:
    """Raise unless ``ids`` are those of a split: at least one, each once."""
    if not ids:
        raise ValueError(f"{where} is empty; a split names at least one id")
    for id in ids:
        check_id(id, f"{where}: id")
    if len(set(ids)) < len(ids):
        twice = next(id for id, count in Counter(ids).items() if count > 1)
        raise ValueError(f"{where} lists {twice!r} twice")


def _read_ids(root: Path, split: str) -> list[str]:
    check_id(split, "split")
    path = root / "splits" / f"{split}.txt"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; the splits of {root} are {split_names(root)}")
    require_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error}); save it as such") from error
    ids = [line.strip() for line in text.splitlines() if line.strip()]
    check_split(ids, str(path))
    return ids


def _require_size(path: Path, size: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(size) != expected:
        raise ValueError(f"{path} is {_text(size)} but its image is {_text(expected)}; they must cover the same pixels")


def _text(size: tuple[int, ...]) -> str:
    return f"{size[0]}×{size[1]} (height×width)"
