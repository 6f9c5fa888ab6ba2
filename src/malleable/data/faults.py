"""What goes wrong with depth, camera-true: other scales, noise, holes, 8 bits, a shift against the image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from malleable.data.sample import Sample, SampleDataset
from malleable.data.synthetic.sensor import kinect, stereo
from malleable.data.tv_tensors import Depth

_GRAIN = 8  # pixels between the points that decide where holes lie


def holes(depth: Tensor, share: float, random: torch.Generator | None = None) -> Tensor:
    """Make ``share`` of the pixels of depth (1, H, W) unknown, in patches some ten pixels wide."""
    height, width = depth.shape[-2:]
    grid = torch.rand(1, 1, height // _GRAIN + 2, width // _GRAIN + 2, generator=random)
    field = F.interpolate(grid, size=(height, width), mode="bicubic")[0]
    count = round(share * field.numel())
    lost = torch.zeros(field.numel(), dtype=torch.bool)
    lost[field.flatten().topk(count).indices] = True
    return torch.where(lost.view_as(depth), 0.0, depth)


def scattered(depth: Tensor, share: float, random: torch.Generator | None = None) -> Tensor:
    """Make each pixel unknown by itself, with the probability ``share``, as where a few rays measure an image."""
    return torch.where(torch.rand(depth.shape, generator=random) < share, 0.0, depth)


def noise(
    depth: Tensor, metres: float = 0.0, relative: float = 0.0, random: torch.Generator | None = None, width: int = 1
) -> Tensor:
    """Add noise to each known pixel of depth (…, H, W): its standard deviation is ``metres`` and a part of the depth.

    It is independent from pixel to pixel, or, with a ``width``, the more alike the less than that two pixels are apart.
    """
    *batch, rows, columns = depth.shape
    drawn = torch.randn(*batch, rows + width - 1, columns + width - 1, generator=random)
    if width > 1:  # the mean of n numbers has a deviation of 1 / √n
        drawn = F.avg_pool2d(drawn, width, stride=1) * width
    noisy = depth + (metres + relative * depth) * drawn
    return torch.where(depth > 0, noisy.clamp(min=1e-3), 0.0)


def misplaced(depth: Tensor, pixels: int) -> Tensor:
    """Move depth (1, H, W) ``pixels`` to the right of where it belongs: a wrong registration."""
    return F.pad(depth, (pixels, 0))[..., : depth.shape[-1]]


class DepthFaults(v2.Transform):  # type: ignore[misc]
    """Spoil the depth of an image as sensors do, so that a network learns to do without.

    Args:
        dropout: probability that all depth of an image is unknown.
        holes: probability of holes, over any share of the image up to nine tenths.
        noise: largest relative standard deviation of independent noise; each image draws its own.
    """

    def __init__(self, dropout: float = 0.0, holes: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        for name, value in (("dropout", dropout), ("holes", holes), ("noise", noise)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be 0 to 1, got {value}")
        self.dropout, self.holes, self.noise = dropout, holes, noise

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not isinstance(inpt, Depth):
            return inpt
        depth = inpt.as_subclass(Tensor)
        if self.noise:
            depth = noise(depth, relative=self.noise * float(torch.rand(())))
        drawn = float(torch.rand(()))
        if drawn < self.dropout:
            depth = torch.zeros_like(depth)
        elif drawn < self.dropout + (1 - self.dropout) * self.holes:
            depth = holes(depth, 0.9 * float(torch.rand(())))
        return depth.as_subclass(Depth)


@dataclass(frozen=True)
class Stress:
    """A fault to test a network with.

    Args:
        family: faults of one kind, which differ in ``strength`` alone.
        strength: for the axis of a figure.
        apply: changes a sample; its randomness is the generator's.
    """

    name: str
    family: str
    strength: float
    apply: Callable[[Sample, torch.Generator], Sample]


class Stressed(SampleDataset):
    """``dataset`` with one fault. Sample by sample it is the same whenever and in whatever order they are read."""

    def __init__(self, dataset: SampleDataset, stress: Stress) -> None:
        self.name, self.ids, self.classes, self.palette = dataset.name, dataset.ids, dataset.classes, dataset.palette
        self.dataset, self.stress = dataset, stress

    def __getitem__(self, index: int) -> Sample:
        sample = self.dataset[index]
        random = torch.Generator().manual_seed(crc32(f"{self.stress.name} {sample.id}".encode()))
        return self.stress.apply(sample, random)


def _on_depth(change: Callable[[Tensor, torch.Generator], Tensor]) -> Callable[[Sample, torch.Generator], Sample]:
    def apply(sample: Sample, random: torch.Generator) -> Sample:
        return replace(sample, depth=change(sample.depth.as_subclass(Tensor), random).to(torch.float32))

    return apply


def _random_scale(depth: Tensor, random: torch.Generator) -> Tensor:
    return depth * 10 ** float(2 * torch.rand((), generator=random) - 1)


def _eight_bits(depth: Tensor, random: torch.Generator, shift: bool) -> Tensor:
    """Depth as a grey image: counts of 0 … 255 from nothing, or from the nearest pixel, to the farthest."""
    known = depth > 0
    if not known.any():
        return depth
    nearest, farthest = (depth[known].min() if shift else torch.tensor(0.0)), depth.max()
    counts = (255 * (depth - nearest) / (farthest - nearest).clamp(min=1e-6)).round()
    return torch.where(known, counts, 0.0)


def _sensor(sample: Sample, random: torch.Generator, stereo_rig: bool) -> Sample:
    """Let a sensor measure the depth that is known as if it were true."""
    depth = sample.depth.as_subclass(Tensor)[0].numpy()
    known = depth > 0
    true = np.where(known, depth, depth[known].max() if known.any() else 1).astype(np.float32)
    generator = np.random.default_rng(random.initial_seed())
    focal = sample.camera.focal
    measured = stereo(true, focal, depth.shape[1], generator) if stereo_rig else kinect(true, focal, generator)
    return replace(sample, depth=torch.from_numpy(np.where(known, measured, 0).astype(np.float32))[None])


def _focal(sample: Sample, random: torch.Generator, factor: float) -> Sample:
    camera = sample.camera
    return replace(sample, camera=replace(camera, fx=camera.fx * factor, fy=camera.fy * factor))


STRESSES: Sequence[Stress] = (
    *(
        Stress(f"depth × {factor:g}", "scale", factor, _on_depth(lambda d, _, f=factor: d * f))  # type: ignore[misc]
        for factor in (0.1, 0.25, 4, 10)
    ),
    Stress("depth × 0.1 … 10 at random", "random scale", 10, _on_depth(_random_scale)),
    Stress("8 bits of the farthest", "8 bits", 0, _on_depth(partial(_eight_bits, shift=False))),
    Stress("8 bits, nearest to farthest", "8 bits", 1, _on_depth(partial(_eight_bits, shift=True))),
    Stress("noise of 2 cm", "noise in metres", 0.02, _on_depth(lambda d, random: noise(d, metres=0.02, random=random))),
    Stress("noise of 2 %", "noise", 0.02, _on_depth(lambda d, random: noise(d, relative=0.02, random=random))),
    Stress(
        "noise of 2 %, 4 pixels wide",
        "wide noise",
        0.02,
        _on_depth(lambda d, random: noise(d, relative=0.02, random=random, width=4)),
    ),
    Stress("noise of a Kinect", "sensor", 0, partial(_sensor, stereo_rig=False)),
    Stress("noise of a stereo rig", "sensor", 1, partial(_sensor, stereo_rig=True)),
    *(
        Stress(f"{share:.0%} unknown", "holes", share, _on_depth(lambda d, r, s=share: holes(d, s, r)))  # type: ignore[misc]
        for share in (0.25, 0.5, 0.9)
    ),
    *(
        Stress(f"{share:.0%} scattered", "scattered holes", share, _on_depth(lambda d, r, s=share: scattered(d, s, r)))  # type: ignore[misc]
        for share in (0.5, 0.95)
    ),
    Stress("no depth", "holes", 1.0, _on_depth(lambda d, _: torch.zeros_like(d))),
    *(
        Stress(f"shifted by {pixels} pixels", "shift", pixels, _on_depth(lambda d, _, p=pixels: misplaced(d, p)))  # type: ignore[misc]
        for pixels in (2, 4, 8)
    ),
    *(Stress(f"focal length × {factor:g}", "focal", factor, partial(_focal, factor=factor)) for factor in (0.8, 1.2)),
)
"""What ``malleable evaluate --stress`` tries, in the order of its table."""


def chosen_stresses(names: Sequence[str]) -> Sequence[Stress]:
    """Find faults by their names, in the order of the table; all for none."""
    known = [stress.name for stress in STRESSES]
    for name in names:
        if name not in known:
            raise ValueError(f"faults must be some of {'; '.join(known)}, got {name!r}")
    return [stress for stress in STRESSES if stress.name in names] if names else STRESSES
