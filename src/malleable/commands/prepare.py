"""``malleable prepare`` brings a data set's own files into the folder layout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from malleable.data.nyudv2 import prepare_nyudv2
from malleable.data.sunrgbd import prepare_sunrgbd
from malleable.files import held
from malleable.progress import available_cores


def prepare(
    dataset: Literal["nyudv2", "sunrgbd"],
    source: str,
    out: str,
    size: tuple[int, int] | None = None,
    depth: Literal["filled", "raw"] = "filled",
    workers: int | None = None,
) -> None:
    """Write a data set in the folder layout that every other command reads.

    Interrupted, it goes on where it was when the same command is given again. OUT appears when it is complete.

    Args:
        dataset: which data set.
        source: its own file, nyu_depth_v2_labeled.mat, or the folder with SUNRGBD/ and SUNRGBDtoolbox/.
        out: the folder to make; it must not exist.
        size: height and width to resize to, for example --size 240 320; the camera follows.
        depth: filled (holes in-painted by the authors) or raw (holes stay invalid).
        workers: threads; all cores by default.
    """
    if size is not None and min(size) < 1:
        raise ValueError(f"size must be (height, width), both at least 1, got {size}")
    write = {"nyudv2": prepare_nyudv2, "sunrgbd": prepare_sunrgbd}[dataset]
    folder = Path(out).absolute()
    with held(folder.with_name(f"{folder.name}.lock")):  # a second one would sweep away what this one has half written
        count = write(Path(source), folder, size, depth, workers or available_cores())
    print(f"{out} is ready with {count} images; 'malleable check {out}' looks through it")
