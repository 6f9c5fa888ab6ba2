"""Cityscapes from its own tree: leftImg8bit, disparity, camera, gtFine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from malleable.camera import Camera
from malleable.data.image_files import read_counts, read_indices, read_rgb
from malleable.data.palette import Colour
from malleable.data.sample import Sample, SampleDataset
from malleable.data.tv_tensors import IGNORE
from malleable.files import error_in, read_json

SPLITS = ("train", "val", "test")

FARTHEST = 300.0
"""Beyond these metres a disparity is below two pixels and says little more than "far": such depth is invalid."""

# Train id in order: name, colour, the label id in the annotation files.
_CLASSES: tuple[tuple[str, Colour, int], ...] = (
    ("road", (128, 64, 128), 7),
    ("sidewalk", (244, 35, 232), 8),
    ("building", (70, 70, 70), 11),
    ("wall", (102, 102, 156), 12),
    ("fence", (190, 153, 153), 13),
    ("pole", (153, 153, 153), 17),
    ("traffic light", (250, 170, 30), 19),
    ("traffic sign", (220, 220, 0), 20),
    ("vegetation", (107, 142, 35), 21),
    ("terrain", (152, 251, 152), 22),
    ("sky", (70, 130, 180), 23),
    ("person", (220, 20, 60), 24),
    ("rider", (255, 0, 0), 25),
    ("car", (0, 0, 142), 26),
    ("truck", (0, 0, 70), 27),
    ("bus", (0, 60, 100), 28),
    ("train", (0, 80, 100), 31),
    ("motorcycle", (0, 0, 230), 32),
    ("bicycle", (119, 11, 32), 33),
)


class Cityscapes(SampleDataset):
    """Reads one split (``train``, ``val`` or ``test``) with fine annotations and depth from disparity.

    The set was recorded with two rigs of different baseline and focal length: each image's own camera file is used.
    The test split has no public labels; they are 255 there unless its annotation files are in the tree.
    """

    def __init__(self, root: str | Path, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        self.root, self.split, self.name = Path(root), split, "cityscapes"
        self.classes = tuple(name for name, _, _ in _CLASSES)
        self.palette = tuple(colour for _, colour, _ in _CLASSES)
        self._class_of = torch.full((256,), IGNORE)
        for train_id, (_, _, label_id) in enumerate(_CLASSES):
            self._class_of[label_id] = train_id
        suffix = "_leftImg8bit.png"
        folder = self.root / "leftImg8bit" / split
        self.ids = sorted(path.name.removesuffix(suffix) for path in folder.glob(f"*/*{suffix}"))
        if not self.ids:
            raise FileNotFoundError(
                f"no images <city>/*{suffix} in {folder}; root must hold leftImg8bit, disparity, camera and gtFine"
            )
        self.labelled = split != "test" or any(self._label_path(id).exists() for id in self.ids)

    def __getitem__(self, index: int) -> Sample:
        id = self.ids[index]
        image = read_rgb(self._path("leftImg8bit", id, "leftImg8bit.png"))
        size = (image.shape[1], image.shape[2])
        camera, baseline = _read_camera(self._path("camera", id, "camera.json"), size)
        counts = read_counts(self._path("disparity", id, "disparity.png"))
        label = self._label(self._label_path(id), size)
        for name, found in (("disparity", tuple(counts.shape)), ("label", tuple(label.shape))):
            if found != size:
                raise ValueError(f"{id}: {name} is {found} but the image {size}; they must cover the same pixels")
        return Sample(image, depth_of_disparity(counts, baseline, camera.fx)[None], label, camera, id)

    def _path(self, kind: str, id: str, suffix: str) -> Path:
        return self.root / kind / self.split / id.split("_")[0] / f"{id}_{suffix}"

    def _label_path(self, id: str) -> Path:
        return self._path("gtFine", id, "gtFine_labelIds.png")

    def _label(self, path: Path, size: tuple[int, int]) -> Tensor:
        if not self.labelled or (self.split == "test" and not path.exists()):
            return torch.full(size, IGNORE)
        return self._class_of[torch.from_numpy(read_indices(path).astype(np.int64))]


def depth_of_disparity(counts: Tensor, baseline: float, fx: float) -> Tensor:
    """Turn 16-bit counts p into metres, baseline · fx / disparity of (p − 1) / 256; 0 where it is unknown or far."""
    disparity = (counts.to(torch.float32) - 1) / 256
    known = disparity * FARTHEST >= baseline * fx  # also false for p = 0 (no match) and p = 1 (no disparity)
    return torch.where(known, baseline * fx / torch.where(known, disparity, 1.0), 0.0)


def _read_camera(path: Path, size: tuple[int, int]) -> tuple[Camera, float]:
    entries = read_json(path)
    try:
        intrinsic = entries["intrinsic"]
        fx, fy, cx, cy = (float(intrinsic[name]) for name in ("fx", "fy", "u0", "v0"))
        baseline = float(entries["extrinsic"]["baseline"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must hold intrinsic fx, fy, u0, v0 and extrinsic baseline ({error!r})") from error
    if not baseline > 0:
        raise ValueError(f"{path}: baseline must be positive metres, got {baseline}")
    with error_in(path):
        return Camera(fx, fy, cx, cy, size), baseline
