"""SUN RGB-D: from its own tree, SUNRGBD/ and SUNRGBDtoolbox/, to the folder layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from malleable.camera import Camera
from malleable.data.folder import check_id
from malleable.data.image_files import read_counts, read_rgb
from malleable.data.matlab import hdf5_array, open_hdf5, read_variables
from malleable.data.sample import Sample
from malleable.data.tv_tensors import IGNORE
from malleable.data.writer import FolderWriter, variant
from malleable.files import error_in
from malleable.progress import parallel_map, with_progress

SENSORS = ("kv1", "kv2", "realsense", "xtion")
"""Kinect, Kinect 2, RealSense and Xtion as the tree calls them; each has splits of its own, train-kv1 and so on."""

CLASSES = (
    "wall", "floor", "cabinet", "bed", "chair", "sofa", "table", "door", "window", "bookshelf", "picture", "counter",
    "blinds", "desk", "shelves", "curtain", "dresser", "pillow", "mirror", "floor mat", "clothes", "ceiling", "books",
    "fridge", "tv", "paper", "towel", "shower curtain", "box", "whiteboard", "person", "night stand", "toilet", "sink",
    "lamp", "bathtub", "bag",
)  # fmt: skip
"""The 37 classes in the order of the toolbox; label 0 of its files is none of them."""

FARTHEST = 8.0
"""Metres at which the toolbox ends: what is farther is set to this."""

_IMAGES = "SUNRGBD"
_META = "SUNRGBDtoolbox/Metadata/SUNRGBDMeta.mat"
_LABELS = "SUNRGBDtoolbox/Metadata/SUNRGBD2Dseg.mat"
_SPLIT = "SUNRGBDtoolbox/traintestSUNRGBD/allsplit.mat"


@dataclass(frozen=True)
class _Entry:
    """An image as the toolbox lists it; its number there is that of its labels."""

    number: int
    id: str  # its folder in SUNRGBD/
    image: str
    depth: str

    @property
    def sensor(self) -> str:
        return self.id.partition("/")[0]


def prepare_sunrgbd(
    root: Path, out: Path, size: tuple[int, int] | None, depth: Literal["filled", "raw"], workers: int
) -> int:
    """Write the tree ``root`` to the folder ``out``, see ``malleable prepare``; returns how many images."""
    for name in (_IMAGES, _META, _LABELS, _SPLIT):
        if not (root / name).exists():
            raise FileNotFoundError(
                f"{root / name} is missing; {root} must hold what SUNRGBD.zip and SUNRGBDtoolbox.zip of the data set's "
                "own site unpack to"
            )
    entries, train, test = _entries(root / _META), *_split(root / _SPLIT)
    official = train | test
    left = [entry.id for entry in entries if entry.id not in official]
    if left:
        raise ValueError(
            f"{root / _SPLIT} names {left[0]} neither to train nor to test; download SUNRGBDtoolbox.zip again"
        )
    splits = {"train": [e for e in entries if e.id in train], "test": [e for e in entries if e.id not in train]}
    settings = {"size": None if size is None else list(size), "depth": depth}
    with open_hdf5(root / _LABELS) as mat:
        with error_in(root / _LABELS):
            labels = _Labels(mat, len(entries))
        writer = FolderWriter(out, variant("sunrgbd", size, depth), CLASSES, metres_per_count=0.001, settings=settings)
        resize = v2.Identity() if size is None else v2.Resize(size)

        def convert(entry: _Entry) -> None:
            writer.write(resize(_sample(root / _IMAGES, entry, labels, depth)))

        missing = [entry for entry in entries if not writer.has(entry.id)]
        for _ in with_progress(parallel_map(convert, missing, workers), len(missing), "sunrgbd"):
            pass
    ids = {split: [entry.id for entry in chosen] for split, chosen in splits.items()}
    for split, chosen in splits.items():
        ids |= {f"{split}-{sensor}": [e.id for e in chosen if e.sensor == sensor] for sensor in SENSORS}
    writer.finish({split: chosen for split, chosen in ids.items() if chosen})
    return len(entries)


def decode(counts: Tensor) -> Tensor:
    """Turn 16-bit counts into metres as the toolbox does: rotated by three bits they are millimetres, up to 8 m."""
    millimetres = (counts >> 3) | (counts << 13 & 0xFFFF)
    return (millimetres.float() / 1000).clamp(max=FARTHEST)


def _entries(path: Path) -> list[_Entry]:
    """List the images of the tree in the order of their labels."""
    (meta,) = read_variables(path, "SUNRGBDMeta")
    entries = []
    for number, about in enumerate(meta):
        try:
            image, depth = str(about.rgbpath), str(about.depthname)
        except AttributeError as error:
            raise ValueError(f"{path}: image {number + 1} has no rgbpath or depthname") from error
        parts = _parts(image)
        if len(parts) < 3:
            raise ValueError(
                f"{path}: image {number + 1} has the path {image!r}, not .../{_IMAGES}/<folders>/image/<file>"
            )
        *folder, _, name = parts
        entry = _Entry(number, "/".join(folder), name, depth)
        for part in (entry.id, name, depth):
            check_id(part, f"{path}: image {number + 1}")
        if entry.sensor not in SENSORS:
            raise ValueError(f"{path}: image {number + 1} is of {entry.sensor!r}, not of {', '.join(SENSORS)}")
        entries.append(entry)
    return entries


def _split(path: Path) -> tuple[set[str], set[str]]:
    """Read the official split: the ids to train and to test with."""
    train, test = read_variables(path, "alltrain", "alltest")
    return _ids(train), _ids(test)


def _ids(folders: Iterable[Any]) -> set[str]:
    return {"/".join(_parts(str(folder))) for folder in folders}


def _parts(path: str) -> list[str]:
    """Split a path of the machine that the set was made on, and take what lies in SUNRGBD/."""
    return [part for part in path.partition(f"/{_IMAGES}/")[2].split("/") if part]


class _Labels:
    """Reads the labels of the open file. MATLAB stores columns first: an H × W array shows here as (W, H)."""

    def __init__(self, mat: Any, count: int) -> None:
        group = mat.get("SUNRGBD2Dseg")
        if group is None or "seglabel" not in group:
            raise ValueError("it has no SUNRGBD2Dseg.seglabel")
        references = hdf5_array(group, "seglabel", "O")
        if references.size != count:
            raise ValueError(f"it has labels of {references.size} images, but SUNRGBDMeta.mat lists {count}")
        self.mat, self.references = mat, references[()].ravel()

    def __getitem__(self, entry: _Entry) -> Tensor:
        array = self.mat[self.references[entry.number]]
        kind = getattr(getattr(array, "dtype", None), "kind", "")
        if kind not in ("u", "i", "f") or array.ndim != 2 or array.is_virtual or array.external:
            raise ValueError(f"{entry.id}: its label is no matrix of numbers in this file")
        raw = torch.from_numpy(np.ascontiguousarray(array[()].T).astype(np.int64))
        if raw.min() < 0 or raw.max() > len(CLASSES):
            raise ValueError(
                f"{entry.id}: labels must be 0 to {len(CLASSES)}, got {int(raw.min())} to {int(raw.max())}"
            )
        return torch.where(raw > 0, raw - 1, IGNORE)


def _sample(root: Path, entry: _Entry, labels: _Labels, depth: Literal["filled", "raw"]) -> Sample:
    folder = root / entry.id
    image = read_rgb(folder / "image" / entry.image)
    size = (image.shape[1], image.shape[2])
    filled = folder / "depth_bfx" / entry.depth
    counts = read_counts(filled if depth == "filled" and filled.exists() else folder / "depth" / entry.depth)
    label = labels[entry]
    for name, found in (("depth", tuple(counts.shape)), ("label", tuple(label.shape))):
        if found != size:
            raise ValueError(f"{entry.id}: {name} is {found} but the image {size}; they must cover the same pixels")
    return Sample(image, decode(counts)[None], label, _camera(folder / "intrinsics.txt", size), entry.id)


def _camera(path: Path, size: tuple[int, int]) -> Camera:
    """Read the nine numbers of an intrinsic matrix, row by row. MATLAB counts pixels from 1."""
    try:
        numbers = [float(word) for word in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as an intrinsic matrix ({error}); unpack SUNRGBD.zip again") from error
    if len(numbers) != 9:
        raise ValueError(f"{path} must hold the nine numbers of an intrinsic matrix, got {len(numbers)}")
    fx, _, cx, _, fy, cy, *_ = numbers
    height, width = size
    with error_in(path):
        return Camera.from_dict({"width": width, "height": height, "fx": fx, "fy": fy, "cx": cx - 1, "cy": cy - 1})
