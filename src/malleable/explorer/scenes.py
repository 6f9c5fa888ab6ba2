"""What the page shows to a layer: scenes to pick from, files that are handed in, and faults of their depth."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from malleable.data.faults import holes, misplaced, noise
from malleable.data.folder import IMAGE_SUFFIXES
from malleable.data.loose import Flags, Item, find_items
from malleable.data.sample import Sample, SampleDataset
from malleable.figures.style import Array

LARGEST_FILE = 32 * 2**20
"""Bytes of a file that is handed in."""
DEPTH_SUFFIXES = (".png", ".npy")

_LARGEST_IMAGE = 16e6  # pixels of an image that is handed in
_WIDEST = 960  # pixels of what is sent to the page
_MOST_POINTS = 24_000
_TOP = 65_535


def items_of(dataset: SampleDataset) -> list[Item]:
    """List the samples of a data set, to be read one by one."""
    return [Item(id, partial(dataset.__getitem__, index)) for index, id in enumerate(dataset.ids)]


def handed_in(image: str | None, depth: str | None, unit: str, focal: float | None) -> Sample:
    """Read an image and its depth from files of a stranger, and say in a sentence what is wrong with them.

    ``unit`` is that of counts; a ``.npy`` is in metres.
    """
    if image is None:
        raise ValueError("hand in an image first: PNG or JPEG")
    measured = None if depth is None else Path(depth)
    counted = measured is not None and measured.suffix.lower() != ".npy"
    picture, flags = Path(image), Flags(measured, unit if counted else None, focal=focal or None)
    try:
        _check(picture, IMAGE_SUFFIXES, "an image")
        if flags.depth is not None:
            _check(flags.depth, DEPTH_SUFFIXES, "depth")
        (item,) = find_items([image], None, flags)
        return item.load()
    except (ValueError, TypeError, OSError) as error:
        said = str(error).replace("add --focal PIXELS, --camera FILE, or dataset.json", "give its focal length")
        for path in (picture, flags.depth):  # where the page keeps them tells nobody anything
            said = said if path is None else said.replace(str(path), path.name)
        raise ValueError(said) from error


def _check(path: Path, suffixes: Sequence[str], what: str) -> None:
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{path} is no file for {what}: it must be one of {', '.join(suffixes)}")
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than {LARGEST_FILE:,}; hand in a smaller one")
    if path.suffix.lower() == ".npy":
        return
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as opened:  # reads no more than its size
            pixels = opened.width * opened.height
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image; export it again as PNG or JPEG") from error
    if pixels > _LARGEST_IMAGE:
        raise ValueError(f"{path} has {pixels:,} pixels, more than {_LARGEST_IMAGE:,.0f}; hand in a smaller one")


@dataclass(frozen=True)
class Fault:
    """Says what is wrong with depth: first it is scaled, then shifted, noisy, out of place, and unknown in part."""

    times: float = 1.0
    plus: float = 0.0  # metres
    noise: float = 0.0  # standard deviation, as a part of depth
    pixels: int = 0  # to the right
    unknown: float = 0.0  # part of the image, 1 is all

    def __call__(self, sample: Sample) -> Sample:
        """Spoil the depth of ``sample``; the same fault gives the same depth each time."""
        random = torch.Generator().manual_seed(0)
        depth = sample.depth.as_subclass(Tensor)
        depth = torch.where(depth > 0, (depth * self.times + self.plus).clamp(min=0), 0.0)
        if self.noise:
            depth = noise(depth, relative=self.noise, random=random)
        if self.pixels:
            depth = misplaced(depth, self.pixels)
        if self.unknown:
            depth = holes(depth, self.unknown, random.manual_seed(1))
        return replace(sample, depth=depth)


def with_focal(sample: Sample, focal: float) -> Sample:
    """Give ``sample`` another focal length, the ratio of fx and fy kept."""
    camera, factor = sample.camera, focal / sample.camera.focal
    return replace(sample, camera=replace(camera, fx=camera.fx * factor, fy=camera.fy * factor))


def picture_of(sample: Sample) -> dict[str, Any]:
    """Make what the page shows of the image: its size, and the image as a data URL, smaller if it is large."""
    height, width = sample.camera.size
    pixels = sample.image.as_subclass(Tensor)
    shown = pixels if pixels.dtype == torch.uint8 else (255 * pixels).round().to(torch.uint8)
    return {"width": width, "height": height, "image": data_url(shown.permute(1, 2, 0).numpy(), "JPEG")}


def depth_of(sample: Sample) -> dict[str, Any]:
    """Make what the page turns into points: every ``step``-th pixel's depth in 16 bits, row by row, 0 where unknown."""
    height, width = sample.camera.size
    step = int(np.ceil(np.sqrt(height * width / _MOST_POINTS)))
    depth = sample.depth.as_subclass(Tensor)[0, ::step, ::step].numpy()
    farthest = float(depth.max())
    counts = np.where(depth > 0, np.maximum(1, np.round(depth * (_TOP / max(farthest, 1e-9)))), 0).astype("<u2")
    return {
        "step": step,
        "rows": counts.shape[0],
        "columns": counts.shape[1],
        "metres": farthest / _TOP,
        "counts": base64.b64encode(counts.tobytes()).decode(),
    }


def data_url(pixels: Array, kind: str = "PNG") -> str:
    """Write (H, W, 3) uint8 as an image inside of a page, no wider or higher than a page needs."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    if max(image.size) > _WIDEST:
        image.thumbnail((_WIDEST, _WIDEST), Image.Resampling.NEAREST if kind == "PNG" else Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 90} if kind == "JPEG" else {}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
