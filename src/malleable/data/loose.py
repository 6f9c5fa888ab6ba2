"""Images to predict, from files, folders or a split of a data set: found at once, read one by one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from malleable.camera import Camera, metres_per_count
from malleable.data.cityscapes import Cityscapes
from malleable.data.folder import (
    DEPTH_SUFFIXES,
    IMAGE_SUFFIXES,
    Description,
    FolderDataset,
    depth_file,
    read_camera,
    read_depth,
)
from malleable.data.image_files import read_rgb
from malleable.data.open import open_dataset
from malleable.data.sample import Sample
from malleable.data.tv_tensors import IGNORE
from malleable.files import error_in

_BESIDE = "_depth"
"""x.jpg and x_depth.png in one folder belong together."""


@dataclass(frozen=True)
class Item:
    """Loads one image when asked to. ``id`` names what is written for it; nobody says the unit of a unitless depth."""

    id: str
    load: Callable[[], Sample]
    unitless: bool = False


@dataclass(frozen=True)
class Flags:
    """Holds what the user says about depth and camera; it goes before what files say."""

    depth: Path | None = None
    unit: str | None = None
    camera: Path | None = None
    focal: float | None = None
    fx: float | None = None
    fy: float | None = None
    scale_free: bool = False  # any unit will do
    estimated: bool = False  # depth will be made for images without

    def camera_of(self, size: tuple[int, int], known: Camera | None) -> Camera | None:
        """Give the camera of an image of ``size``: ``known``, but for what the flags say; None if nobody knows."""
        if self.camera is not None:
            known = read_camera(self.camera)
        fx, fy = (self.focal if given is None else given for given in (self.fx, self.fy))
        if known is not None and known.size != size:
            if self.camera is not None or fx is None or fy is None:
                raise ValueError(
                    f"its camera is for {known.size}, the image is {size} (height, width); give that of its size"
                )
            known = None
        if known is None:
            fx, fy = fy if fx is None else fx, fx if fy is None else fy
            if fx is None or fy is None:
                return None
            return centered(fx, fy, size)
        return replace(known, fx=known.fx if fx is None else fx, fy=known.fy if fy is None else fy)


def find_items(inputs: Sequence[str], split: str | None, flags: Flags) -> list[Item]:
    """Find all images in ``inputs``, in order, by their names: nothing but ``dataset.json`` is read yet."""
    if not inputs:
        raise ValueError("inputs must name at least one image, folder or data set")
    if flags.unit is not None:
        metres_per_count(flags.unit)
    if split is not None:
        given = [f.name for f in fields(flags) if f.name != "scale_free" and getattr(flags, f.name) != f.default]
        if len(inputs) > 1 or given:
            extra = f"{len(inputs)} inputs" if len(inputs) > 1 else ", ".join(given)
            raise ValueError(
                f"split takes one data set, which says its depth and camera itself, got {extra} too; leave that out"
            )
        data = open_dataset(inputs[0], split, strict=False)
        if isinstance(data, FolderDataset | Cityscapes):
            data.labelled = False  # labels are not needed, so they may be missing
        return [Item(id, partial(data.__getitem__, index)) for index, id in enumerate(data.ids)]
    items = [item for name in inputs for item in _items(Path(name), flags)]
    if flags.depth is not None and flags.depth.is_file() and len(items) > 1:
        raise ValueError(
            f"depth is the one file {flags.depth} for {len(items)} images; give the folder that holds them"
        )
    twice = [id for id, count in Counter(item.id for item in items).items() if count > 1]
    if twice:
        raise ValueError(f"inputs hold {len(twice)} names twice, for example {twice[0]!r}; predict them one at a time")
    return items


def centered(fx: float, fy: float, size: tuple[int, int]) -> Camera:
    """Make a camera that looks through the middle of the image."""
    return Camera(fx, fy, (size[1] - 1) / 2, (size[0] - 1) / 2, size)


def _items(path: Path, flags: Flags) -> Iterator[Item]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is neither a file nor a folder; a data set needs --split")
    path = path.absolute()  # the name of its folder matters
    folder = path / "images" if (path / "images").is_dir() else path if path.is_dir() else path.parent
    # An id may name folders: images/kitchen/1.png is kitchen/1.
    above = (place for place in (folder, *folder.parents) if place.name == "images")
    folder, searched = next((place for place in above if (place.parent / "depth").is_dir()), folder), folder
    layout = folder.name == "images" and (folder.parent / "depth").is_dir()  # else depth lies beside the images
    files = [path]
    if path.is_dir():
        found = searched.rglob("*") if layout or searched is not path else searched.iterdir()
        images = (file for file in found if file.suffix.lower() in IMAGE_SUFFIXES)
        files = sorted(file for file in images if layout or not file.stem.endswith(_BESIDE))
        if not files:
            raise FileNotFoundError(
                f"{searched} holds no images ({', '.join(IMAGE_SUFFIXES)}); a data set needs --split"
            )
    root = folder.parent if folder.name == "images" else folder
    described = root / "dataset.json"
    description = Description.read(described) if described.exists() else None
    for file in files:
        id = str(file.relative_to(folder).with_suffix(""))
        beside = depth_file(root / "depth" / id if layout else file.with_name(file.stem + _BESIDE))
        if flags.depth is not None:
            beside = depth_file(flags.depth / id) if flags.depth.is_dir() else flags.depth
        load = partial(_read, file, beside, root / "cameras" / f"{id}.json", id, flags, description)
        yield Item(id, load, not flags.unit and description is None and os.path.exists(beside))


def _read(image: Path, depth: Path, camera: Path, id: str, flags: Flags, description: Description | None) -> Sample:
    pixels = read_rgb(image)
    size = (pixels.shape[1], pixels.shape[2])
    with error_in(image):
        known = read_camera(camera) if os.path.exists(camera) else description.camera if description else None
        found = flags.camera_of(size, known)
    metres = torch.zeros(size)
    measured = os.path.exists(depth) or flags.depth is not None
    if found is None and (measured or flags.estimated):
        raise ValueError(f"{image} has depth but no camera; add --focal PIXELS, --camera FILE, or dataset.json")
    if measured:
        metres = _depth(depth, size, flags, description)
    found = found or centered(size[1], size[1], size)  # of no effect without depth
    return Sample(pixels, metres[None], torch.full(size, IGNORE), found, id)


def _depth(path: Path, size: tuple[int, int], flags: Flags, description: Description | None) -> Tensor:
    suffix = path.suffix.lower()
    if suffix not in DEPTH_SUFFIXES:
        raise ValueError(f"{path} is no depth file; save depth as a 16-bit grey PNG or, in metres, as .npy")
    invalid = 0
    if suffix == ".npy":
        unit: str | float | None = flags.unit or (None if flags.scale_free else 1.0)
    else:
        unit = flags.unit or (description.metres_per_count if description else None)
        invalid = description.invalid_depth if description else 0
    if unit is None and not flags.scale_free:
        raise ValueError(f"{path} has no unit; add --unit mm (or m, 0.1mm, 1/5000m, or metres per count)")
    return read_depth(path, size, None if unit is None else metres_per_count(unit), invalid)
