"""Depth, label and camera as tv_tensors, so that every torchvision v2 transform treats them rightly.

Depth and label are sampled, never mixed: pixel i of the new map takes the source pixel whose centre is nearest to
u = (i + 0.5) · old / new − 0.5, the place the camera says pixel i looks at. The two are at most half a source pixel
apart, so a surviving depth keeps its exact value and its 3D point moves sideways by at most z / (2 f).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from malleable.camera import Camera

IGNORE = 255
"""The label of a pixel that counts neither in the loss nor in a metric."""


class Depth(tv_tensors.Mask):  # type: ignore[misc]
    """(1, H, W) float32 metres, 0 where unknown. Borders that a transform adds are unknown."""


class Label(tv_tensors.Mask):  # type: ignore[misc]
    """(H, W) int64 class indices, 255 where unknown. Borders that a transform adds are unknown."""


class Intrinsics(tv_tensors.TVTensor):  # type: ignore[misc]
    """A :class:`Camera` while it travels through a transform: (6,) fx, fy, cx, cy, height, width."""

    @classmethod
    def of(cls, camera: Camera) -> Intrinsics:
        numbers = (camera.fx, camera.fy, camera.cx, camera.cy, *camera.size)
        return torch.tensor(numbers, dtype=torch.float64).as_subclass(cls)


def to_camera(intrinsics: Tensor) -> Camera:
    """The camera that :meth:`Intrinsics.of` was made from."""
    fx, fy, cx, cy, height, width = intrinsics.tolist()
    return Camera(fx, fy, cx, cy, (int(height), int(width)))


def _unflatten(leaves: Iterable[Any], _: object) -> Any:
    (leaf,) = leaves
    return to_camera(leaf) if isinstance(leaf, Tensor) else leaf


# v2 transforms walk through containers as pytrees: a Camera anywhere in a sample shows itself as an Intrinsics leaf.
pytree.register_pytree_node(Camera, lambda camera: ([Intrinsics.of(camera)], None), _unflatten)


def nearest(old: int, new: int, device: torch.device | None = None) -> Tensor:
    """(new,) the source pixel of each pixel when ``old`` pixels become ``new``; ties go right. Exact, in integers."""
    return (2 * torch.arange(new, device=device) + 1) * old // (2 * new)


def _resize_map(x: Tensor, size: Sequence[int] | int | None, max_size: int | None) -> Tensor:
    height, width = _resized(x.shape[-2:], size, max_size)
    if (height, width) == tuple(x.shape[-2:]):
        return x
    rows, columns = nearest(x.shape[-2], height, x.device), nearest(x.shape[-1], width, x.device)
    return x.index_select(-2, rows).index_select(-1, columns)


def _resized(old: Sequence[int], size: Sequence[int] | int | None, max_size: int | None) -> tuple[int, int]:
    """The size that torchvision gives an image of size ``old``."""
    if isinstance(size, Sequence) and len(size) == 2:
        return size[0], size[1]
    image = torch.empty(1, *old, dtype=torch.uint8, device="meta")
    height, width = F.resize(image, size, v2.InterpolationMode.NEAREST, max_size=max_size).shape[-2:]
    return height, width


def _crop_map(x: Tensor, top: int, left: int, height: int, width: int, unknown: int) -> Tensor:
    """The window of ``height`` × ``width`` from (``top``, ``left``), ``unknown`` where it leaves the map."""
    window = x[..., max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    if tuple(window.shape[-2:]) == (height, width):
        return window
    above, before = min(max(-top, 0), height), min(max(-left, 0), width)
    below, after = height - above - window.shape[-2], width - before - window.shape[-1]
    return torch.nn.functional.pad(window, (before, after, above, below), value=unknown)


def _center_window(size: Sequence[int], output_size: Sequence[int] | int) -> tuple[int, int, int, int]:
    """(top, left, height, width) of torchvision's central crop."""
    sizes = [output_size] if isinstance(output_size, int) else list(output_size)
    height, width = sizes if len(sizes) == 2 else sizes * 2
    top, left = (
        round((old - new) / 2) if old >= new else -((new - old) // 2)
        for old, new in zip(size, (height, width), strict=True)
    )
    return top, left, height, width


def _padded_window(size: Sequence[int], padding: Sequence[int] | int) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the image with ``padding`` as torchvision takes it: all, (x, y) or four sides."""
    sides = [padding] if isinstance(padding, int) else list(padding)
    left, top, right, bottom = sides * (4 // len(sides))
    return -top, -left, size[0] + top + bottom, size[1] + left + right


def _register_map(kind: type[Depth] | type[Label], unknown: int) -> None:
    """Kernels of ``kind``: sampled, never mixed, with every pixel from outside the image marked ``unknown``."""

    def kernel(functional: Callable[..., Any]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
        def register(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def on_tensor(inpt: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                return change(inpt.as_subclass(Tensor), *args, **kwargs).as_subclass(kind)

            F.register_kernel(functional, kind)(on_tensor)
            return change

        return register

    @kernel(F.resize)
    def resize(x: Tensor, size: Sequence[int] | int | None, max_size: int | None = None, **_: Any) -> Tensor:
        return _resize_map(x, size, max_size)

    @kernel(F.crop)
    def crop(x: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
        return _crop_map(x, top, left, height, width, unknown)

    @kernel(F.resized_crop)
    def resized_crop(x: Tensor, top: int, left: int, height: int, width: int, size: Sequence[int], **_: Any) -> Tensor:
        return _resize_map(crop(x, top, left, height, width), size, None)

    @kernel(F.center_crop)
    def center_crop(x: Tensor, output_size: Sequence[int] | int) -> Tensor:
        return crop(x, *_center_window(x.shape[-2:], output_size))

    @kernel(F.pad)
    def pad(x: Tensor, padding: Sequence[int] | int, padding_mode: str = "constant", **_: Any) -> Tensor:
        # A mirrored border shows the classes it mirrors, but no sensor measured it.
        if kind is Depth or padding_mode == "constant":
            return crop(x, *_padded_window(x.shape[-2:], padding))
        padded: Tensor = F.pad(x.as_subclass(tv_tensors.Mask), padding, padding_mode=padding_mode)
        return padded.as_subclass(Tensor)

    def as_mask(functional: Callable[..., Any]) -> None:
        @kernel(functional)
        def change(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            # Shifted, because torchvision fills with 0 whatever falls outside.
            mask = (x - unknown).as_subclass(tv_tensors.Mask)
            changed: Tensor = functional(mask, *args, **{**kwargs, "fill": None})
            return changed.as_subclass(Tensor) + unknown

    for functional in (F.rotate, F.affine, F.perspective, F.elastic):
        as_mask(functional)


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


@_camera_kernel(F.crop)
def _crop(camera: Camera, top: int, left: int, height: int, width: int) -> Camera:
    return camera.crop(top, left, height, width)


@_camera_kernel(F.resized_crop)
def _resized_crop(
    camera: Camera, top: int, left: int, height: int, width: int, size: Sequence[int], **_: Any
) -> Camera:
    window = camera.crop(top, left, height, width)
    return window.resize(_resized(window.size, size, None))


@_camera_kernel(F.center_crop)
def _center_crop(camera: Camera, output_size: Sequence[int] | int) -> Camera:
    return camera.crop(*_center_window(camera.size, output_size))


@_camera_kernel(F.pad)
def _pad(camera: Camera, padding: Sequence[int] | int, **_: Any) -> Camera:
    return camera.crop(*_padded_window(camera.size, padding))


_camera_kernel(F.horizontal_flip)(Camera.hflip)
_camera_kernel(F.vertical_flip)(Camera.vflip)


def _refuse(functional: Callable[..., Any]) -> None:
    def kernel(inpt: Intrinsics, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{functional.__name__} leaves no pinhole camera of fx, fy, cx, cy, so depth would no longer be true; "
            "use resize, crop, pad or flip, or leave the camera out of the sample"
        )

    F.register_kernel(functional, Intrinsics)(kernel)


for _functional in (F.rotate, F.affine, F.perspective, F.elastic, F.five_crop, F.ten_crop):
    _refuse(_functional)
