"""One RGB-D image with its labels and camera, a batch of them, and what every data set offers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset
from torchvision import tv_tensors

from malleable.camera import Camera
from malleable.data.palette import Colour
from malleable.data.tv_tensors import IGNORE, Depth, Label


@dataclass(frozen=True, eq=False)
class Sample:
    """Holds an image and all that belongs to it. torchvision v2 transforms take it whole and return a Sample.

    Plain tensors are wrapped, so that transforms know which is which. NumPy arrays are copied into tensors.

    image: (3, H, W) uint8, float32 once normalised.
    depth: (1, H, W) float32 metres, 0 = invalid.
    label: (H, W) int64, 255 = ignore; 255 everywhere for an image without labels.
    camera: of this very image, whatever transforms it went through.
    id: names the sample in errors and predictions.
    """

    image: Tensor
    depth: Tensor
    label: Tensor
    camera: Camera
    id: str = ""

    def __post_init__(self) -> None:
        size = tuple(self.camera.size)
        for name, kind, expected in (
            ("image", tv_tensors.Image, (3, *size)),
            ("depth", Depth, (1, *size)),
            ("label", Label, size),
        ):
            tensor = self._tensor(name)
            if tuple(tensor.shape) != expected:
                raise ValueError(
                    f"sample {self.id!r}: {name} must be {expected} as its camera, got {tuple(tensor.shape)}"
                )
            object.__setattr__(self, name, tensor.as_subclass(kind))
        if self.image.dtype != torch.uint8 and not self.image.is_floating_point():
            raise TypeError(f"sample {self.id!r}: image must be uint8 or floating-point, got {self.image.dtype}")
        if not self.depth.is_floating_point() or self.label.is_floating_point():
            raise TypeError(
                f"sample {self.id!r}: depth must be floating-point metres and label whole numbers, got "
                f"{self.depth.dtype} and {self.label.dtype}; malleable.to_metres converts counts"
            )

    def _tensor(self, name: str) -> Tensor:
        """Give the part ``name`` as a tensor; of an array floats become float32, and integers but uint8 int64.

        What a NumPy array masks is unknown: depth 0, and label 255.
        """
        part: Any = getattr(self, name)
        if isinstance(part, np.ndarray):
            kind = {"f": np.float32, "i": np.int64, "u": np.int64}.get(part.dtype.kind, part.dtype)
            part = part.astype(part.dtype if part.dtype == np.uint8 else kind)
            part = torch.from_numpy(np.ma.filled(part, IGNORE if name == "label" else 0))
        if not isinstance(part, Tensor):
            raise TypeError(f"sample {self.id!r}: {name} must be a tensor or an array, got {type(part).__name__}")
        return part.long() if name == "label" and not part.is_floating_point() else part


def _unflatten(parts: Iterable[Any], id: Any) -> Any:
    image, depth, label, camera = parts
    if all(isinstance(part, Tensor) for part in (image, depth, label)) and isinstance(camera, Camera):
        return Sample(image, depth, label, camera, id)
    return (image, depth, label, camera, id)  # something else was made of the parts


# v2 transforms walk through containers as pytrees.
pytree.register_pytree_node(Sample, lambda s: ([s.image, s.depth, s.label, s.camera], s.id), _unflatten)


class SampleDataset(Dataset[Sample]):
    """Gives samples by their index.

    ``classes`` are names, ``palette`` one (red, green, blue) of 0..255 per class, ``ids`` name the samples in order.
    ``labelled`` is False if every label is known to be 255.
    """

    name: str
    ids: list[str]
    classes: tuple[str, ...]
    palette: tuple[Colour, ...]
    labelled: bool = True

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        raise NotImplementedError


class Batch(NamedTuple):
    """Holds what a network and a loss are given.

    ``focal``, the mean of fx and fy, belongs to the image as it is here, after all transforms.
    """

    image: Tensor  # (N, 3, H, W) float32
    depth: Tensor  # (N, 1, H, W) float32 metres, 0 = invalid
    label: Tensor  # (N, H, W) int64, 255 = ignore
    focal: Tensor  # (N,) float32 pixels
    ids: list[str]


def collate(samples: Sequence[Sample]) -> Batch:
    """Make a batch of plain tensors from samples of one size."""
    sizes = {tuple(sample.camera.size) for sample in samples}
    if len(sizes) != 1:
        ids = ", ".join(sample.id for sample in samples)
        raise ValueError(f"samples of a batch must have one size, got {sorted(sizes)} for {ids}; crop or resize them")
    image, depth, label = (
        torch.stack([part.as_subclass(Tensor) for part in parts])
        for parts in zip(*((sample.image, sample.depth, sample.label) for sample in samples), strict=True)
    )
    if not image.is_floating_point():
        raise TypeError(f"images must be normalised float32 to be batched, got {image.dtype}; add eval_transform()")
    focal = torch.tensor([sample.camera.focal for sample in samples], dtype=torch.float32)
    return Batch(image, depth, label, focal, [sample.id for sample in samples])
