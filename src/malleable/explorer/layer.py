"""What one layer sees at one pixel: its neighbours, and how much of each every kernel takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from malleable.assign import Invalid, handle_invalid
from malleable.data.sample import Sample
from malleable.figures.inspection import Seeing, geometry_of
from malleable.figures.style import Array, Kernel, kernels
from malleable.geometry import Geometry, grid_unit
from malleable.layers import Conv25d, DepthAwareConv2d, DepthConv2d, MalleableConv2d

MOST_KERNELS = 5
"""As many as the page has sliders for."""


@dataclass(frozen=True)
class Layer:
    """Says what a layer is, and the rate of the map that it reads.

    ``centers`` (K + 2,), ``temperature`` and ``scales`` (K,) are those of malleable convolution, ``alpha`` that of the
    depth-aware one, which has one kernel. ``taps`` are those of one side of the window. ``invalid`` says what a tap
    without depth counts as, ``fill_depth`` that its depth is interpolated first, and ``smooth_depth`` how many medians
    depth passes.
    """

    conv: str = "malleable"
    kernels: int = 3
    taps: int = 5
    dilation: int = 2
    rate: int = 4
    centers: tuple[float, ...] = ()
    temperature: float = 1.0
    scales: tuple[float, ...] = ()
    alpha: float = 8.3
    invalid: Invalid = "same"
    fill_depth: bool = False
    smooth_depth: int = 0

    @classmethod
    def of(cls, seeing: Seeing) -> Layer:
        """Describe a layer of a network; its window must be square, with a tap in the middle."""
        layer = seeing.layer
        if len({*layer.kernel_size}) > 1 or len({*layer.dilation}) > 1 or layer.kernel_size[0] % 2 == 0:
            raise ValueError(f"{seeing.title} has a window of {layer.kernel_size}; only square odd ones can be shown")
        if layer.kernels > MOST_KERNELS:
            raise ValueError(f"{seeing.title} has {layer.kernels} kernels; at most {MOST_KERNELS} can be shown")
        window = (layer.kernels, layer.kernel_size[0], layer.dilation[0], seeing.rate)
        known = cls(
            "conv25d",
            *window,
            invalid=layer.invalid,
            fill_depth=seeing.fill_depth,
            smooth_depth=seeing.smooth_depth,
        )
        if isinstance(layer, DepthAwareConv2d):
            return replace(known, conv="depth_aware", alpha=layer.alpha)
        if isinstance(layer, MalleableConv2d):
            centers, scales = tuple(layer.centers.tolist()), tuple(layer.scales.tolist())
            return replace(
                known, conv="malleable", centers=centers, temperature=layer.temperature.item(), scales=scales
            )
        return known

    def module(self, dilation: int = 1, padding: int = 0) -> DepthConv2d:
        """Build it for one channel; by default for a window that is a map of its own."""
        window: dict[str, Any] = {"kernel_size": self.taps, "dilation": dilation, "padding": padding}
        if self.conv == "depth_aware":
            return DepthAwareConv2d(1, 1, **window, alpha=self.alpha)
        if self.conv == "conv25d":
            return Conv25d(1, 1, **window, kernels=self.kernels)
        return MalleableConv2d(
            1, 1, **window, kernels=self.kernels, centers=self.centers or None, temperature=self.temperature
        )

    @property
    def looks(self) -> list[Kernel]:
        """Tell how figures show each kernel."""
        if self.conv == "depth_aware":
            return kernels([0.0])
        if self.conv == "malleable" and self.centers:
            return kernels(self.centers[1:-1])
        return kernels(np.arange(self.kernels) - (self.kernels - 1) / 2)


@dataclass(frozen=True)
class Seen:
    """Holds a window around a pixel, its T taps row by row.

    pixel: (x, y) of the center, on the map that the layer reads.
    taps: (T, 2), x and y in the image. inside: (T,) bool, on the image.
    depth: (T,) metres, 0 where unknown or outside.
    d: (T,), relative differences; metres for depth-aware convolution. 0 where not known: (T,) bool.
    g: (K, T), the share that each kernel takes of each tap.
    unit: metres that count as a difference of 1; None without depth at the center.
    """

    pixel: tuple[int, int]
    taps: Array
    inside: Array
    depth: Array
    d: Array
    known: Array
    g: Array
    unit: float | None


@torch.no_grad()
def look(layer: Layer, sample: Sample, pixel: tuple[int, int]) -> Seen:
    """Find what ``layer`` sees at the pixel of its map that is nearest to ``pixel`` (x, y) of the image."""
    height, width = sample.camera.size
    x, y = (
        min(max(round(at / layer.rate), 0), -(-length // layer.rate) - 1) * layer.rate
        for at, length in zip(pixel, (width, height), strict=True)
    )
    step, reach = layer.rate * layer.dilation, layer.taps // 2
    offsets = step * np.arange(-reach, reach + 1)
    columns, rows = (part.ravel() for part in np.meshgrid(x + offsets, y + offsets))
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    depth = torch.zeros(layer.taps**2)
    metres = geometry_of(sample, layer.fill_depth, layer.smooth_depth).depth[0, 0]
    depth[torch.from_numpy(inside)] = metres[torch.from_numpy(rows[inside]), torch.from_numpy(columns[inside])]
    # The window as a map of its own: one step there is so many pixels here, so its focal length is as much smaller.
    size = (layer.taps, layer.taps)
    geometry = Geometry(depth.view(1, 1, *size), sample.camera.focal / step)
    module = layer.module()
    in_metres = isinstance(module, DepthAwareConv2d)
    d, known = (geometry.depth_difference if in_metres else geometry.relative_depth)(module.window, size)
    g = module.receptive_field(d.flatten()[None]).transpose(0, 1)
    g = handle_invalid(g, known.flatten()[None], layer.invalid)[0]
    center = float(depth[module.window.center])
    unit = 1.0 if in_metres else grid_unit(center, sample.camera.focal, layer.rate, layer.dilation)
    return Seen(
        (x, y),
        np.stack([columns, rows], axis=1),
        inside,
        depth.numpy(),
        d.flatten().numpy(),
        known.flatten().numpy(),
        g.numpy(),
        unit if center > 0 else None,
    )


@torch.no_grad()
def field(layer: Layer, points: int = 161) -> tuple[Array, Array]:
    """Evaluate g_k (K, D) over the differences (D,) at which there is anything to see."""
    outermost = max(map(abs, layer.centers), default=(layer.kernels + 1) / 2)
    reach = 5 / max(layer.alpha, 0.5) if layer.conv == "depth_aware" else outermost + 1.5
    d = torch.linspace(-reach, reach, points, dtype=torch.float64)
    return d.numpy(), layer.module().receptive_field(d).numpy()
