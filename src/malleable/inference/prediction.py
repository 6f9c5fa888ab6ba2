"""What a network says about images that a program holds: arrays, PIL or tensors in, :class:`Prediction` out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from malleable.camera import Camera, depth_tensor
from malleable.data.loose import Flags, centered
from malleable.data.palette import Colour
from malleable.data.sample import Sample
from malleable.data.tv_tensors import IGNORE
from malleable.inference.estimate import DepthEstimator
from malleable.inference.probabilities import probabilities
from malleable.models.summary import sees_depth
from malleable.runs.scores import Protocol


@dataclass(frozen=True, eq=False)
class Prediction:
    """Holds the classes of every pixel of one image.

    labels: (H, W) int64, the index of the most probable class.
    probabilities: (C, H, W) float32.
    image: (H, W, 3) uint8, as it was given.
    palette: a colour per class.
    """

    labels: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    image: NDArray[np.uint8]
    palette: tuple[Colour, ...]

    @property
    def colour(self) -> NDArray[np.uint8]:
        """Give the labels in the palette's colours, (H, W, 3) uint8."""
        return np.array(self.palette, np.uint8)[self.labels]

    def overlay(self) -> Image.Image:
        """Draw the colours of the labels half over the image."""
        return Image.fromarray(((self.image.astype(np.uint16) + self.colour) // 2).astype(np.uint8))


def label(net: nn.Module, sample: Sample, palette: Sequence[Colour], protocol: Protocol | None = None) -> Prediction:
    """Label one sample. Every way to predict comes here; several threads may at once."""
    likely = probabilities(net, sample, protocol)  # (C, H, W)
    shown = _bytes(sample.image.as_subclass(Tensor)).permute(1, 2, 0).cpu().numpy()
    return Prediction(likely.argmax(0).cpu().numpy(), likely.cpu().numpy(), shown, tuple(palette))


def predict(
    net: nn.Module,
    palette: Sequence[Colour],
    protocol: Protocol,
    image: Any,
    depth: Any = None,
    focal: Any = None,
    camera: Any = None,
    estimator: Any = None,
) -> Prediction | list[Prediction]:
    """Label an image, or a batch of them one by one; the arguments are those of ``Trained.predict``."""
    if estimator is not None:
        estimator = estimator if isinstance(estimator, DepthEstimator) else DepthEstimator(estimator)
        estimator.check(net)
    if isinstance(image, list | tuple) or getattr(image, "ndim", 3) == 4:
        parts = [_each(name, value, len(image)) for name, value in _named(depth, focal, camera)]
        every = zip(image, *parts, [estimator] * len(image), strict=True)
        return [label(net, sample_of(net, *each), palette, protocol) for each in every]
    return label(net, sample_of(net, image, depth, focal, camera, estimator), palette, protocol)


def sample_of(
    net: nn.Module, image: Any, depth: Any, focal: Any, camera: Any, estimator: DepthEstimator | None = None
) -> Sample:
    """Make a sample of what a program holds, and say what is wrong with it."""
    pixels = _pixels(image)
    size = (pixels.shape[1], pixels.shape[2])
    if not isinstance(camera, Camera | Mapping | None):
        raise TypeError(
            f"camera must be a malleable.Camera or a dict of width, height, fx, fy, cx and cy, got "
            f"{type(camera).__name__}"
        )
    known = Camera.from_dict(camera) if isinstance(camera, Mapping) else camera
    found = Flags(focal=None if focal is None else _one_focal(focal)).camera_of(size, known)
    if depth is None and estimator is None:
        if sees_depth(net):
            warnings.warn("there is no depth, so the network sees colours only", stacklevel=2)
        metres = torch.zeros(size)
    else:
        metres = estimator(_bytes(pixels)) if depth is None and estimator is not None else _metres(depth, size)
        if found is None and sees_depth(net):
            raise ValueError("depth needs a camera: pass focal=, in pixels of this image, or camera=malleable.Camera")
    return Sample(pixels, metres[None], torch.full(size, IGNORE), found or centered(size[1], size[1], size))


def _pixels(image: Any) -> Tensor:
    """Give (3, H, W), uint8 or float32 from 0 to 1."""
    _check_read("image", image)
    if isinstance(image, Image.Image):
        if image.mode == "F" or image.mode.startswith("I"):  # which Pillow would cut off at 255
            raise ValueError(f"image must have 8 bits per channel, got a PIL image of mode {image.mode!r}")
        image = np.array(image.convert("RGB"))
    last = isinstance(image, np.ndarray)  # where channels usually are
    pixels = torch.as_tensor(np.ascontiguousarray(image) if last else image).cpu()
    if pixels.ndim != 3 or 3 not in (pixels.shape[0], pixels.shape[2]):
        raise ValueError(f"image must be RGB, (H, W, 3) or (3, H, W), or a batch of such, got {tuple(pixels.shape)}")
    if pixels.shape[2] == 3 and (last or pixels.shape[0] != 3):
        pixels = pixels.permute(2, 0, 1)
    if pixels.is_floating_point():
        pixels = pixels.float()
        if not ((pixels >= 0) & (pixels <= 1)).all():
            raise ValueError(
                f"image of {pixels.dtype} must lie in 0..1, got {pixels.min():g} to {pixels.max():g}; "
                "give colours of 0..255 as uint8, and none that are normalised"
            )
    elif pixels.dtype != torch.uint8:
        raise ValueError(f"image must be uint8, or floating-point from 0 to 1, got {pixels.dtype}")
    return pixels.contiguous()


def _bytes(pixels: Tensor) -> Tensor:
    return pixels if pixels.dtype == torch.uint8 else (255 * pixels).round().to(torch.uint8)


def _metres(depth: Any, size: tuple[int, int]) -> Tensor:
    """Give (H, W) float32 metres, 0 where unknown."""
    _check_read("depth", depth)
    metres = depth_tensor(np.array(depth) if isinstance(depth, Image.Image) else depth).cpu()
    if not metres.is_floating_point():
        raise ValueError(
            f"depth must be floating-point metres, got counts of {metres.dtype}; malleable.to_metres(depth, 'mm') "
            "turns them into metres if a count is a millimetre"
        )
    if metres.ndim == 3:
        metres = metres[0] if metres.shape[0] == 1 else metres[..., 0] if metres.shape[2] == 1 else metres
    if tuple(metres.shape) != size:
        raise ValueError(
            f"depth must have the image's size, {size} (height, width), got {tuple(metres.shape)}; "
            "register it to the image, and resize it to the nearest pixel if it is registered"
        )
    metres = metres.float()
    return torch.where(metres.isfinite() & (metres > 0), metres, 0.0)


def _one_focal(focal: Any) -> float:
    """Give the number that ``focal`` is, or holds alone."""
    number = focal.tolist() if hasattr(focal, "tolist") else focal
    while isinstance(number, list | tuple):
        if len(number) != 1:
            raise ValueError(
                f"focal must be one number for an image, the mean of fx and fy, got {focal}; pass camera= for both"
            )
        number = number[0]
    try:
        return float(number)
    except (TypeError, ValueError):
        raise TypeError(f"focal must be a number of pixels, got {focal!r}") from None


def _check_read(name: str, value: Any) -> None:
    if isinstance(value, str | Path):
        raise TypeError(
            f"{name} must be an array, a tensor or a PIL image, got the path {str(value)!r}; read it first, for "
            "example with PIL.Image.open, or label files with 'malleable predict'"
        )


def _named(depth: Any, focal: Any, camera: Any) -> list[tuple[str, Any]]:
    return [("depth", depth), ("focal", focal), ("camera", camera)]


def _each(name: str, value: Any, count: int) -> Sequence[Any]:
    """Give each image of a batch its own ``value``; a camera or a focal length may be that of all."""
    if value is None or isinstance(value, int | float | Camera | Mapping) or getattr(value, "ndim", 1) == 0:
        return [value] * count
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise TypeError(f"{name} must be one for each of the {count} images, got one {type(value).__name__}")
    if len(value) != count:
        raise ValueError(f"{name} must be one for each of the {count} images, got {len(value)}")
    return value  # type: ignore[no-any-return]
