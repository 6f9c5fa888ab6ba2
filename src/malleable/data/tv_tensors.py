"""Depth, label and camera as tv_tensors, so that every torchvision v2 transform treats them rightly.

Depth and label are sampled, never mixed: pixel i of the new map takes the source pixel whose center is nearest to
u = (i + 0.5) · old / new − 0.5, the place the camera says pixel i looks at. The two are at most half a source pixel
apart, so a surviving depth keeps its exact value and its 3D point moves sideways by at most z / (2 f).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from malleable.camera import Camera

IGNORE = 255
"""A pixel with this label counts neither in the loss nor in a score."""


class Depth(tv_tensors.Mask):  # type: ignore[misc]
    """Holds (1, H, W) float32 metres, 0 where unknown. Borders that a transform adds are unknown."""


class Label(tv_tensors.Mask):  # type: ignore[misc]
    """Holds (H, W) int64 class indices, 255 where unknown. Borders that a transform adds are unknown."""


class Intrinsics(tv_tensors.TVTensor):  # type: ignore[misc]
    """Stands for a :class:`Camera` inside a transform: (6,) fx, fy, cx, cy, height, width."""

    @classmethod
    def of(cls, camera: Camera) -> Intrinsics:
        numbers = (camera.fx, camera.fy, camera.cx, camera.cy, *camera.size)
        return torch.tensor(numbers, dtype=torch.float64).as_subclass(cls)


def to_camera(intrinsics: Tensor) -> Camera:
    """Make the camera again that :meth:`Intrinsics.of` was given."""
    fx, fy, cx, cy, height, width = intrinsics.tolist()
    return Camera(fx, fy, cx, cy, (int(height), int(width)))


def _unflatten(leaves: Iterable[Any], _: object) -> Any:
    (leaf,) = leaves
    return to_camera(leaf) if isinstance(leaf, Tensor) else leaf


# v2 transforms walk through containers as pytrees: a Camera anywhere in a sample shows itself as an Intrinsics leaf.
pytree.register_pytree_node(Camera, lambda camera: ([Intrinsics.of(camera)], None), _unflatten)


def nearest(old: int, new: int, device: torch.device | None = None) -> Tensor:
    """Give the source pixels (new,) when ``old`` pixels become ``new``, exactly, in integers; ties go right."""
    return (2 * torch.arange(new, device=device) + 1) * old // (2 * new)


def _resize_map(x: Tensor, size: Sequence[int] | int | None, max_size: int | None = None, **_: Any) -> Tensor:
    height, width = _resized(x.shape[-2:], size, max_size)
    rows, columns = nearest(x.shape[-2], height, x.device), nearest(x.shape[-1], width, x.device)
    return x.index_select(-2, rows).index_select(-1, columns)


def _resized(old: Sequence[int], size: Sequence[int] | int | None, max_size: int | None = None) -> tuple[int, int]:
    """Give the size that torchvision gives an image of size ``old``."""
    if isinstance(size, Sequence) and len(size) == 2:
        return size[0], size[1]
    image = torch.empty(1, *old, dtype=torch.uint8, device="meta")
    height, width = F.resize(image, size, v2.InterpolationMode.NEAREST, max_size=max_size).shape[-2:]
    return height, width


def _register_map(kind: type[Depth] | type[Label], unknown: int) -> None:
    """Have maps of ``kind`` sampled, never mixed, and every pixel from outside the image marked ``unknown``."""

    def register(functional: Callable[..., Any], change: Callable[..., Tensor]) -> None:
        def kernel(inpt: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return change(inpt.as_subclass(Tensor), *args, **kwargs).as_subclass(kind)

        F.register_kernel(functional, kind)(kernel)

    def as_mask(functional: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "fill" in kwargs:
            kwargs["fill"] = None
        if functional is F.pad and kind is Depth:  # a mirrored border shows classes, but no sensor measured it
            kwargs["padding_mode"] = "constant"
        mask = (x - unknown).as_subclass(tv_tensors.Mask)  # because torchvision fills with 0 whatever falls outside
        changed: Tensor = functional(mask, *args, **kwargs)
        return changed.as_subclass(Tensor) + unknown

    def resized_crop(x: Tensor, top: int, left: int, height: int, width: int, size: Sequence[int], **_: Any) -> Tensor:
        return _resize_map(as_mask(F.crop, x, top, left, height, width), size)

    register(F.resize, _resize_map)
    register(F.resized_crop, resized_crop)
    for functional in (F.crop, F.center_crop, F.pad, F.rotate, F.affine, F.perspective, F.elastic):
        register(functional, partial(as_mask, functional))


_register_map(Depth, 0)
_register_map(Label, IGNORE)


def _camera_kernel(functional: Callable[..., Any]) -> Callable[[Callable[..., Camera]], None]:
    def register(change: Callable[..., Camera]) -> None:
        def kernel(inpt: Intrinsics, *args: Any, **kwargs: Any) -> Intrinsics:
            return Intrinsics.of(change(to_camera(inpt), *args, **kwargs))

        F.register_kernel(functional, Intrinsics)(kernel)

    return register


@_camera_kernel(F.resize)
def _resize(camera: Camera, size: Sequence[int] | int | None, max_size: int | None = None, **_: Any) -> Camera:
    return camera.resize(_resized(camera.size, size, max_size))


@_camera_kernel(F.resized_crop)
def _resized_crop(
    camera: Camera, top: int, left: int, height: int, width: int, size: Sequence[int], **_: Any
) -> Camera:
    return camera.crop(top, left, height, width).resize(_resized((height, width), size))


@_camera_kernel(F.center_crop)
def _center_crop(camera: Camera, output_size: Sequence[int] | int) -> Camera:
    sizes = [output_size] if isinstance(output_size, int) else list(output_size)
    height, width = sizes if len(sizes) == 2 else sizes * 2
    top, left = (
        round((old - new) / 2) if old >= new else -((new - old) // 2)
        for old, new in zip(camera.size, (height, width), strict=True)
    )
    return camera.crop(top, left, height, width)


@_camera_kernel(F.pad)
def _pad(camera: Camera, padding: Sequence[int] | int, **_: Any) -> Camera:
    sides = [padding] if isinstance(padding, int) else list(padding)  # all, (x, y) or four
    return camera.pad(*sides * (4 // len(sides)))


_camera_kernel(F.crop)(Camera.crop)
_camera_kernel(F.horizontal_flip)(Camera.hflip)
_camera_kernel(F.vertical_flip)(Camera.vflip)


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        f"{name} leaves no pinhole camera of fx, fy, cx, cy, so depth would no longer be true; "
        "use resize, crop, pad or flip, or leave the camera out of the sample"
    )


for _functional in (F.rotate, F.affine, F.perspective, F.elastic, F.five_crop, F.ten_crop):
    _camera_kernel(_functional)(partial(_refuse, _functional.__name__))
