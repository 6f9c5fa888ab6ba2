"""Rendered scenes in a file of the cache folder: each is rendered once, for all processes and all runs."""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from malleable.camera import Camera
from malleable.data.image_files import Array
from malleable.files import cache_folder

Rendered = tuple[Tensor, Tensor, Tensor, Camera]
"""Image (3, H, W) uint8, depth (1, H, W) float32, label (H, W) uint8, and the camera."""


class Kept:
    """Holds ``length`` scenes of ``size``, those that were rendered already.

    A record has a checksum, written last: one that is half-written or damaged is as one never rendered, and two
    processes that render the same scene write the same bytes. Where no file can be written, memory has to do.
    """

    def __init__(self, name: str, length: int, size: tuple[int, int]) -> None:
        self._name, self._length, self._size = f"{name}-{length}-{size[0]}x{size[1]}", length, size
        self._records: Array | None = None  # (length, bytes), opened on first use in each process
        self._path: Path | None = None  # of the file that new ones are written to

    def get(self, position: int) -> Rendered | None:
        """Return what was put, or None."""
        record = self._open()[position]
        known = int(record[-4:].view(np.uint32)[0])
        content = record[:-4].tobytes()
        if known == 0 or crc32(content) != known:
            return None
        height, width = self._size
        pixels, frame = height * width, torch.frombuffer(bytearray(content), dtype=torch.uint8)
        image, depth, label = frame[: 3 * pixels], frame[3 * pixels : 7 * pixels], frame[7 * pixels : 8 * pixels]
        fx, fy, cx, cy = np.frombuffer(content, np.float64, 4, 8 * pixels).tolist()
        camera = Camera(fx, fy, cx, cy, self._size)
        return (
            image.view(3, height, width),
            depth.clone().view(torch.float32).view(1, height, width),  # of any size, it may begin at any byte
            label.view(height, width),
            camera,
        )

    def put(self, position: int, rendered: Rendered) -> None:
        """Keep a scene."""
        image, depth, label, camera = rendered
        numbers = np.array([camera.fx, camera.fy, camera.cx, camera.cy], np.float64)
        content = b"".join(part.tobytes() for part in (image.numpy(), depth.numpy(), label.numpy(), numbers))
        content += np.array([crc32(content) or 1], np.uint32).tobytes()
        records = self._open()
        if self._path is not None:
            try:
                with open(self._path, "r+b") as file:  # a full disk would end a process that wrote to mapped memory
                    file.seek(position * records.shape[1])
                    file.write(content)
                return
            except OSError:
                self._path = None
        records[position] = np.frombuffer(content, np.uint8)

    def _open(self) -> Array:
        if self._records is None:
            shape = (self._length, 8 * math.prod(self._size) + 4 * 8 + 4)
            try:
                folder = cache_folder()
                folder.mkdir(parents=True, exist_ok=True)
                self._path, self._records = _mapped(folder, self._name, shape)
            except (OSError, RuntimeError):  # RuntimeError: a user without a home folder
                self._records = np.zeros(shape, np.uint8)
        return self._records

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_records": None, "_path": None}  # other processes open the file themselves


def _mapped(folder: Path, name: str, shape: tuple[int, int]) -> tuple[Path, Array]:
    """Map the file, of zeros where nothing was written, which take no room on the disk; changes stay in memory."""
    path = folder / f"{name}-{_VERSION}.scenes"
    for other in folder.glob(f"{name}-*.scenes"):  # of versions that render differently
        if other != path:
            with suppress(OSError):  # in a folder that can only be read
                other.unlink(missing_ok=True)
    if not path.exists() or path.stat().st_size < math.prod(shape):
        with open(path, "ab") as file:
            file.truncate(math.prod(shape))
    return path, np.memmap(path, np.uint8, "c", shape=shape)


def _version() -> str:
    """Name the version of what renders: files of another one are not read."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


_VERSION = _version()  # when the code is read: a file that is changed later is not what renders
