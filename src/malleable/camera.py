"""The pinhole camera behind an image, what every change of the image does to it, and depth units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DEPTH_UNITS = {"m": 1.0, "mm": 1e-3, "0.1mm": 1e-4, "1/5000m": 1 / 5000}
"""One count is so many metres in the depth encodings in common use (the last one is TUM RGB-D's)."""

# In pixels; what a file says beyond these is no camera's.
_LEAST, _MOST = {"width": 1, "height": 1, "fx": 1e-3, "fy": 1e-3}, 1e6


def metres_per_count(unit: str | float) -> float:
    """Read a depth unit: a name in ``DEPTH_UNITS`` or a positive number."""
    try:
        metres = DEPTH_UNITS[unit] if unit in DEPTH_UNITS else float(unit)
    except (TypeError, ValueError):
        metres = 0.0
    if not 0 < metres < math.inf:
        raise ValueError(f"unit must be metres per count or one of {', '.join(DEPTH_UNITS)}, got {unit!r}")
    return metres


def depth_tensor(depth: Any) -> Tensor:
    """Make a tensor of an array of depth, 0 where it is masked, or of anything else that torch takes."""
    if isinstance(depth, np.ndarray):  # also flipped views, and the byte order of PGM files
        depth = np.ascontiguousarray(np.ma.filled(depth, 0), depth.dtype.newbyteorder("="))
    return torch.as_tensor(depth)


def to_metres(raw: Tensor | NDArray[Any], unit: str | float) -> Tensor:
    """Turn depth counts of any dtype into float32 metres. ``unit``: a name in ``DEPTH_UNITS`` or metres per count.

    Pixels that are masked in a NumPy array become 0, unknown depth.

    Example:
        >>> import torch, malleable as mb
        >>> mb.to_metres(torch.tensor([0, 1500]), "mm")
        tensor([0.0000, 1.5000])
    """
    return depth_tensor(raw).to(torch.float32) * metres_per_count(unit)


@dataclass(frozen=True)
class Camera:
    """Holds focal lengths and principal point, in pixels of an image of ``size`` (height, width).

    Pixel centers lie on whole numbers: (0, 0) is the center of the first pixel.

    Example:
        >>> import malleable as mb
        >>> camera = mb.Camera(fx=520.0, fy=520.0, cx=319.5, cy=239.5, size=(480, 640))
        >>> camera.resize((240, 320)).focal
        260.0
    """

    fx: float
    fy: float
    cx: float
    cy: float
    size: tuple[int, int]

    def __post_init__(self) -> None:
        if len(self.size) != 2 or not all(side >= 1 and side == int(side) for side in self.size):
            raise ValueError(f"size must be (height, width), whole numbers of at least 1, got {self.size}")
        object.__setattr__(self, "size", (int(self.size[0]), int(self.size[1])))  # a list would equal no image's
        for name in ("fx", "fy"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive focal length in pixels, got {value}")
        for name in ("cx", "cy"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a place in pixels, got {getattr(self, name)}")

    @property
    def focal(self) -> float:
        """Give the one focal length that Eq. 1 needs: the mean of fx and fy."""
        return (self.fx + self.fy) / 2

    def resize(self, size: Sequence[int]) -> Camera:
        """Give the camera of the image resized to ``size`` (height, width); the two factors may differ."""
        height, width = size
        vertical, horizontal = height / self.size[0], width / self.size[1]
        return Camera(
            fx=self.fx * horizontal,
            fy=self.fy * vertical,
            cx=(self.cx + 0.5) * horizontal - 0.5,  # the image's left edge, at −0.5, stays where it is
            cy=(self.cy + 0.5) * vertical - 0.5,
            size=(height, width),
        )

    def scale(self, vertical: float, horizontal: float | None = None) -> Camera:
        """Give the camera of the image resized by factors, sizes rounded to whole pixels."""
        horizontal = vertical if horizontal is None else horizontal
        return self.resize((round(self.size[0] * vertical), round(self.size[1] * horizontal)))

    def crop(self, top: int, left: int, height: int, width: int) -> Camera:
        """Give the camera of the window of ``height`` × ``width`` pixels whose first pixel is (``top``, ``left``)."""
        return replace(self, cx=self.cx - left, cy=self.cy - top, size=(height, width))

    def pad(self, left: int, top: int, right: int, bottom: int) -> Camera:
        """Give the camera of the image with a border added on each side."""
        return self.crop(-top, -left, self.size[0] + top + bottom, self.size[1] + left + right)

    def hflip(self) -> Camera:
        """Give the camera of the image mirrored left to right."""
        return replace(self, cx=self.size[1] - 1 - self.cx)

    def vflip(self) -> Camera:
        """Give the camera of the image mirrored top to bottom."""
        return replace(self, cy=self.size[0] - 1 - self.cy)

    def back_project(self, depth: Tensor) -> Tensor:
        """Turn depth (H, W) in metres into points (3, H, W): x to the right, y down, z away from the camera."""
        if tuple(depth.shape) != tuple(self.size):
            raise ValueError(f"depth must have the camera's size {tuple(self.size)}, got {tuple(depth.shape)}")
        y = torch.arange(depth.shape[0], dtype=depth.dtype, device=depth.device).view(-1, 1)
        x = torch.arange(depth.shape[1], dtype=depth.dtype, device=depth.device)
        return torch.stack([(x - self.cx) / self.fx * depth, (y - self.cy) / self.fy * depth, depth])

    @classmethod
    def from_dict(cls, entries: Mapping[str, object]) -> Camera:
        """Make a camera of ``width, height, fx, fy, cx, cy``, as the data layout's JSON files write it."""
        numbers = {}
        for name in ("width", "height", "fx", "fy", "cx", "cy"):
            value: Any = entries.get(name)
            least, kind = _LEAST.get(name, -_MOST), "whole number" if name in ("width", "height") else "number"
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= _MOST
            if not number or (least == 1 and value != int(value)):
                raise ValueError(f"camera needs a {kind} {name!r} of {least:g} to {_MOST:g} pixels, got {value!r}")
            numbers[name] = value
        fx, fy, cx, cy = (float(numbers[name]) for name in ("fx", "fy", "cx", "cy"))
        return cls(fx, fy, cx, cy, (int(numbers["height"]), int(numbers["width"])))

    def to_dict(self) -> dict[str, float]:
        """Give what :meth:`from_dict` reads."""
        height, width = self.size
        numbers = {name: float(getattr(self, name)) for name in ("fx", "fy", "cx", "cy")}
        return {"width": width, "height": height, **numbers}
