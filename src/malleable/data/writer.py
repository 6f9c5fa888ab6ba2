"""Write a data set in the folder layout: resumable while it grows, and not there at all until it is complete."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from malleable.camera import Camera
from malleable.data.folder import MOST_COUNTS, Description, check_id, check_split, read_camera
from malleable.data.image_files import Array, is_whole_png, write_png
from malleable.data.palette import Colour, default_palette
from malleable.data.sample import Sample
from malleable.data.tv_tensors import IGNORE
from malleable.files import read_json, remove_partial, write_whole

METRES_PER_COUNT = 1 / 5000
"""Files reach 13.1 m, past every indoor sensor, in steps of 0.2 mm: a tenth of a grid cell at 1 m and f = 519."""


def variant(name: str, size: tuple[int, int] | None, depth: str) -> str:
    """Name a data set as it is written: scores on another size or other depth are not comparable."""
    return "-".join([name, *([f"{size[0]}x{size[1]}"] if size else []), *(["raw"] if depth == "raw" else [])])


class FolderWriter:
    """Collects samples in ``<out>.partial`` and renames it to ``out`` when finished.

    Args:
        out: the folder to make. Nothing is overwritten: it must be absent or empty.
        name, classes: of the data set.
        palette: a colour per class; those that a data set without a palette is shown in by default.
        camera: the one that most samples share; every other sample gets a camera file of its own.
        metres_per_count: the unit of the 16-bit depth files. They hold up to 65535 of it: farther depth is an error,
            so give the pixels that a sensor only knows to be far the depth 0 or inf, which are invalid.
        settings: what else the samples depend on, as JSON. A folder begun with other settings is not continued.
    """

    def __init__(
        self,
        out: str | Path,
        name: str,
        classes: Sequence[str],
        palette: Sequence[Colour] | Array | None = None,
        camera: Camera | None = None,
        metres_per_count: float = METRES_PER_COUNT,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.out, self.camera, self.metres_per_count = Path(out).absolute(), camera, metres_per_count
        if self.out.is_symlink() or os.path.ismount(self.out):  # Path.is_mount is not for Windows before Python 3.12
            raise ValueError(
                f"{self.out} is a link or a mount point, which a folder cannot replace; name one inside it"
            )
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ValueError(f"{self.out} exists and is left as it is; remove it or choose another folder")
        self.partial = self.out.with_name(self.out.name + ".partial")
        self._written: dict[str, str] = {}  # file → id
        palette = default_palette(len(classes)) if palette is None else palette
        description = {
            "name": name,
            "ignore": IGNORE,
            "metres_per_count": metres_per_count,
            "invalid_depth": 0,
            **({} if camera is None else {"camera": camera.to_dict()}),
            "settings": dict(settings or {}),
            "classes": list(classes),
            "palette": palette.tolist() if isinstance(palette, np.ndarray) else [list(colour) for colour in palette],
        }
        self.classes = Description.of(description, name).classes
        remove_partial(self.partial)
        if self.partial.exists() and any(self.partial.iterdir()):
            if not (self.partial / "dataset.json").exists():
                raise ValueError(f"{self.partial} holds other files and is left as it is; move it away")
            begun, now = read_json(self.partial / "dataset.json"), json.loads(json.dumps(description))
            other = [key for key in now | begun if begun.get(key) != now.get(key)]
            if other:
                differences = "; ".join(f"{key} {begun.get(key)} and not {now.get(key)}" for key in other)
                raise ValueError(
                    f"{self.partial} was begun with other settings, {differences}; repeat the first command to go on "
                    "with it, or remove it"
                )
        self.partial.mkdir(parents=True, exist_ok=True)
        write_whole(self.partial / "dataset.json", (json.dumps(description, indent=1) + "\n").encode())
        for kind in ("splits", "depth", "labels", "images"):
            (self.partial / kind).mkdir(exist_ok=True)
        # Where names differ in more than upper and lower case, one sample's files would replace another's.
        self._file_of = str.casefold if (self.partial / "DATASET.JSON").exists() else str

    def has(self, id: str) -> bool:
        """Tell whether the sample was written before, in this run or, whole, in an earlier one."""
        if self._file_of(id) in self._written:
            return True
        whole = all(is_whole_png(self.partial / kind / f"{id}.png") for kind in ("images", "depth", "labels"))
        return whole and self._has_camera(id)

    def write(self, sample: Sample) -> None:
        """Add a sample with a uint8 image and an id of its own; several threads may do so at once."""
        check_id(sample.id, "sample id")
        file = self._file_of(sample.id)
        if file in self._written:
            before = self._written[file]
            case = "" if before == sample.id else f" as {before!r}, which is the same file here"
            raise ValueError(f"sample id {sample.id!r} was written before{case}; give every sample an id of its own")
        if sample.image.dtype != torch.uint8:
            raise TypeError(f"{sample.id}: image must be uint8, got {sample.image.dtype}; write what is not normalised")
        wrong = (sample.label != IGNORE) & ((sample.label < 0) | (sample.label >= len(self.classes)))
        if wrong.any():
            number = int(sample.label[wrong][0])
            raise ValueError(f"{sample.id}: labels must be 0 to {len(self.classes) - 1} or {IGNORE}, got {number}")
        counts = self._counts(sample)
        self._written[file] = sample.id  # before it is: another thread may be given the same id
        try:
            self._write_files(sample, counts)
        except BaseException:
            del self._written[file]
            raise

    def finish(self, splits: Mapping[str, Sequence[str]]) -> None:
        """Write the ids of each split, and give the folder its name. Every sample is in a split, or in several."""
        if not splits:
            raise ValueError("splits must hold at least one split: its name and the ids of its samples")
        for split, ids in splits.items():
            check_id(split, "split")
            check_split(ids, f"split {split!r}")
        missing = [id for ids in splits.values() for id in ids if not self.has(id)]
        if missing:
            raise ValueError(f"splits name {len(missing)} samples that were not written, for example {missing[0]!r}")
        labels = self.partial / "labels"
        named = {id for ids in splits.values() for id in ids}
        written = {path.relative_to(labels).with_suffix("").as_posix() for path in labels.rglob("*.png")}
        left = sorted(written - named)
        if left:
            raise ValueError(
                f"{len(left)} samples are in no split, for example {left[0]!r}; add them to one, or delete their files "
                f"in {self.partial}"
            )
        for split, ids in splits.items():
            write_whole(self._path("splits", split, ".txt"), "".join(f"{id}\n" for id in ids).encode())
        if self.out.exists():
            self.out.rmdir()  # it is empty; not every system replaces it
        os.replace(self.partial, self.out)

    def _has_camera(self, id: str) -> bool:
        """Tell whether the sample's own camera is there and whole, or it needs none."""
        path = self.partial / "cameras" / f"{id}.json"
        if not path.exists():
            return self.camera is not None
        try:
            read_camera(path)
        except ValueError:
            return False
        return True

    def _write_files(self, sample: Sample, counts: Array) -> None:
        if sample.camera != self.camera:
            camera = json.dumps(sample.camera.to_dict()).encode()
            write_whole(self._path("cameras", sample.id, ".json"), camera, sync=False)
        write_png(sample.image.permute(1, 2, 0).contiguous().numpy(), self._path("images", sample.id))
        write_png(counts, self._path("depth", sample.id))
        write_png(sample.label.numpy().astype(np.uint8), self._path("labels", sample.id))

    def _path(self, kind: str, id: str, suffix: str = ".png") -> Path:
        """Give the path of a sample's or a split's file, and make its folder; an id may name folders too."""
        path = self.partial / kind / f"{id}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _counts(self, sample: Sample) -> Array:
        """Give the depth in units of the file, 0 where it is not a positive number."""
        depth = sample.depth[0].double().numpy()
        depth = np.where(np.isfinite(depth) & (depth > 0), depth, 0)
        counts = np.rint(depth / self.metres_per_count)
        if counts.max() > MOST_COUNTS:
            least = depth.max() / MOST_COUNTS
            digit = 10.0 ** (math.floor(math.log10(least)) - 1)  # the second, to which it is rounded up
            raise ValueError(
                f"{sample.id}: the farthest depth is {depth.max():g} m, but files with metres_per_count="
                f"{self.metres_per_count:g} end at {MOST_COUNTS * self.metres_per_count:g} m; depth must be in metres, "
                f"and metres_per_count={math.ceil(least / digit) * digit:g} would hold it"
            )
        return counts.astype(np.uint16)
