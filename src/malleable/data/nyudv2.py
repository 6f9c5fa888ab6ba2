"""NYU Depth V2: from its labelled MATLAB (HDF5) file to the folder layout, 894 raw classes to 40."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torchvision.transforms import v2

from malleable.camera import Camera
from malleable.data.matlab import hdf5_array, open_hdf5
from malleable.data.sample import Sample
from malleable.data.tv_tensors import IGNORE
from malleable.data.writer import FolderWriter, variant
from malleable.progress import parallel_map, with_progress

DEPTHS = {"filled": "depths", "raw": "rawDepths"}


@cache
def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(files("malleable.data").joinpath("nyudv2.json").read_text(encoding="utf-8"))
    return facts


def classes() -> tuple[str, ...]:
    """List the 40 classes in their usual order."""
    return tuple(_facts()["classes"])


def raw_to_class() -> dict[str, int]:
    """Map each of the 894 raw class names to the index of one of the 40 classes."""
    return {raw: index for index, names in enumerate(_facts()["classes"].values()) for raw in names.split(", ")}


def splits() -> dict[str, list[int]]:
    """Give the standard split as 0-based image numbers: 795 to train, 654 to test."""
    train: list[int] = []
    for part in _facts()["train"].split(","):
        first, _, last = part.partition("-")
        train += range(int(first) - 1, int(last or first))
    chosen = set(train)
    return {"train": train, "test": [index for index in range(_facts()["images"]) if index not in chosen]}


def camera() -> Camera:
    """Give the camera of the colour images, 640 × 480."""
    return Camera.from_dict(_facts()["camera"])


def prepare_nyudv2(
    file: Path, out: Path, size: tuple[int, int] | None, depth: Literal["filled", "raw"], workers: int
) -> int:
    """Write the labelled set ``file`` to the folder ``out``, see ``malleable prepare``; returns how many images."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; it is nyu_depth_v2_labeled.mat of the data set's own site")
    settings = {"bytes": file.stat().st_size, "size": None if size is None else list(size), "depth": depth}
    with open_hdf5(file) as mat:
        try:
            reader = _Reader(mat, depth)
        except ValueError as error:
            raise ValueError(f"{file}: {error}; it is not nyu_depth_v2_labeled.mat") from error
        view = reader.camera if size is None else reader.camera.resize(size)
        writer = FolderWriter(out, variant("nyudv2", size, depth), classes(), camera=view, settings=settings)
        resize = v2.Identity() if size is None else v2.Resize(size)

        def convert(index: int) -> None:
            writer.write(resize(reader.sample(index)))

        left = [index for index in range(len(reader)) if not writer.has(_id(index))]
        for _ in with_progress(parallel_map(convert, left, workers), len(left), "nyudv2"):
            pass
        ids = {name: [_id(i) for i in chosen if i < len(reader)] for name, chosen in splits().items()}
        writer.finish({name: chosen for name, chosen in ids.items() if chosen})
        return len(reader)


def _id(index: int) -> str:
    return f"{index:04d}"


class _Reader:
    """Reads samples of the open file. MATLAB stores columns first: an H × W × N array shows here as (N, W, H)."""

    def __init__(self, mat: Any, depth: Literal["filled", "raw"]) -> None:
        missing = [name for name in ("images", "labels", "names", DEPTHS[depth]) if mat.get(name, getlink=True) is None]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        self.images = hdf5_array(mat, "images", "u1")
        self.labels, self.depths = hdf5_array(mat, "labels", "u"), hdf5_array(mat, DEPTHS[depth], "f")
        count, channels, width, height = self.images.shape if self.images.ndim == 4 else (0, 0, 0, 0)
        if min(count, width, height) < 1 or channels != 3:
            raise ValueError(f"images has shape {self.images.shape}, expected (images, 3, width, height)")
        full = camera()
        if count > _facts()["images"] or height > full.size[0] or width > full.size[1]:
            raise ValueError(
                f"it claims {count} images of {width} × {height} pixels, NYUDv2 has {_facts()['images']} of "
                f"{full.size[1]} × {full.size[0]}"
            )
        for name, array in (("labels", self.labels), (DEPTHS[depth], self.depths)):
            if array.shape != (count, width, height):
                raise ValueError(f"{name} has shape {array.shape}, expected {(count, width, height)} as the images")
        names, known = _names(mat), raw_to_class()
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"the file names classes that NYUDv2 does not have: {unknown[:5]}")
        self.class_of = np.array([IGNORE, *(known[name] for name in names)])  # of raw label 0, unlabelled, to the last
        self.camera = full.resize((height, width))

    def __len__(self) -> int:
        return int(self.images.shape[0])

    def sample(self, index: int) -> Sample:
        image = np.ascontiguousarray(self.images[index].transpose(0, 2, 1))
        depth = np.ascontiguousarray(self.depths[index].T, dtype=np.float32)
        raw = self.labels[index].T
        if raw.max() >= len(self.class_of):
            raise ValueError(f"image {index}: label {raw.max()} has no name; the file has {len(self.class_of) - 1}")
        label = torch.from_numpy(self.class_of[raw])
        return Sample(torch.from_numpy(image), torch.from_numpy(depth)[None], label, self.camera, _id(index))


def _names(mat: Any) -> list[str]:
    """Read the names of the raw classes, which are references to arrays of 16-bit characters."""
    import h5py

    references = hdf5_array(mat, "names", "O")
    if h5py.check_ref_dtype(references.dtype) is not h5py.Reference:
        raise ValueError(f"names holds {references.dtype}, expected references")
    if references.size > len(raw_to_class()):
        raise ValueError(f"names has {references.size} entries, NYUDv2 has {len(raw_to_class())}")
    names = []
    for reference in references[()].ravel():
        text: Any = mat[reference] if reference else None
        if getattr(text, "dtype", None) != np.uint16 or text.size > 100:
            raise ValueError(f"names must refer to short texts of 16-bit characters, got {text}")
        names.append("".join(map(chr, text[()].ravel())))
    return names
