"""What the depth-seeing layers of a network do with depth: their receptive fields, and which kernel takes what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from malleable.assign import handle_invalid, malleable_logits
from malleable.data.sample import Sample, collate
from malleable.data.transforms import eval_transform
from malleable.geometry import Differences, Geometry
from malleable.layers import Conv25d, DepthAwareConv2d, DepthConv2d, MalleableConv2d
from malleable.models import DeepLabV3Plus
from malleable.models.convert import Placed
from malleable.ops import depth_conv2d
from malleable.ops.window import Window

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Seeing(Placed):
    """A placed layer whose place is known, and the layer itself."""

    stage: str
    rate: int
    layer: DepthConv2d

    @property
    def centers(self) -> Array:
        """Where each kernel looks, (K,): learned centres, or the middles of the cells of a 2.5D convolution."""
        if isinstance(self.layer, MalleableConv2d):
            return _numpy(self.layer.centers)[1:-1]
        return np.arange(self.layer.kernels) - (self.layer.kernels - 1) / 2


def seeing_layers(net: DeepLabV3Plus) -> list[Seeing]:
    """The depth-seeing layers of ``net`` from res2 to res5; none for an RGB baseline."""
    found = (
        Seeing(placed.name, placed.stage, int(placed.rate), layer)
        for placed, layer in zip(net.backbone.placed, net.backbone.layers().values(), strict=True)
        if placed.stage is not None and placed.rate is not None
    )
    return sorted(found, key=lambda seeing: seeing.stage)


@torch.no_grad()
def assigning(d: Array, centers: Sequence[float], temperature: float) -> tuple[Array, Array]:
    """h_0 … h_{K+1} (K + 2, D) and g_1 … g_K (K, D) at relative differences ``d`` (D,), in float64."""
    a = torch.tensor(centers, dtype=torch.float64)
    h = malleable_logits(torch.from_numpy(d)[None].double(), a, temperature)[0]
    return h.numpy(), h.softmax(0)[1:-1].numpy()


@torch.no_grad()
def receptive_field(seeing: Seeing, depth: float, focal: float, metres: Array) -> Array:
    """g_k (K, D) of neighbours that lie ``metres`` (D,) behind a centre pixel at ``depth``.

    NaN for neighbours that would be behind the camera.
    """
    window, geometry, size = _pair(seeing, depth, focal, metres)
    seen = _differences(seeing.layer, geometry, window, size, torch.float64)
    g = seeing.layer.receptive_field(seen.value[:, 0, 0, 0])  # type: ignore[operator]
    return np.where(seen.valid[:, 0, 0, 0].numpy(), g.numpy(), np.nan)


def grid_unit(seeing: Seeing, depth: float, focal: float) -> float:
    """Metres that count as a relative difference of 1 at ``depth`` (Eq. 1)."""
    step = depth / 100
    window, geometry, size = _pair(seeing, depth, focal, np.array([step]))
    return -step / geometry.relative_depth(window, size, torch.float64).value[0, 0, 0, 0].item()


def fields_in_metres(
    methods: Sequence[Sequence[Seeing]], depth: float, focal: float
) -> list[dict[str, tuple[Array, Array, Array]]]:
    """Of each method: stage → metres behind the centre pixel (D,), g (K, D), centers (K,).

    All methods of a stage are looked at over the same metres.
    """
    reach: dict[str, float] = {}
    for seeing in (seeing for layers in methods for seeing in layers):
        outermost = float(np.abs(seeing.centers).max()) + 2.5  # grid cells
        reach[seeing.stage] = max(outermost * grid_unit(seeing, depth, focal), reach.get(seeing.stage, 0.0))
    metres = {stage: np.linspace(-far, far, 401) for stage, far in reach.items()}
    return [
        {s.stage: (metres[s.stage], receptive_field(s, depth, focal, metres[s.stage]), s.centers) for s in layers}
        for layers in methods
    ]


def forerunners(layers: Sequence[Seeing]) -> dict[str, list[Seeing]]:
    """Depth-aware and 2.5D convolutions, as they are by default, in the places of ``layers``."""
    placed: dict[str, list[Seeing]] = {"depth_aware": [], "conv25d": []}
    for seeing in layers:
        layer = seeing.layer
        window = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        placed["depth_aware"].append(replace(seeing, layer=DepthAwareConv2d(1, 1, *window)))
        placed["conv25d"].append(replace(seeing, layer=Conv25d(1, 1, *window, kernels=layer.kernels)))
    return placed


def _pair(seeing: Seeing, depth: float, focal: float, metres: Array) -> tuple[Window, Geometry, tuple[int, int]]:
    """One image for each of ``metres``: on its map, ``dilation`` apart, the neighbour and the centre of a window."""
    dilation = seeing.layer.dilation
    window, size = Window.of((1, 2), dilation=dilation), (1, 1 + dilation[1])
    depths = torch.full((len(metres), 1, *size), depth, dtype=torch.float64)
    depths[:, 0, 0, 0] += torch.from_numpy(metres)
    image = depths.repeat_interleave(seeing.rate, 2).repeat_interleave(seeing.rate, 3)
    return window, Geometry(image, focal), size


def _differences(
    layer: DepthConv2d, geometry: Geometry, window: Window, size: Sequence[int], dtype: torch.dtype = torch.float32
) -> Differences:
    """In the unit that ``layer`` sees: metres or grid cells."""
    if isinstance(layer, DepthAwareConv2d):
        return geometry.depth_difference(window, size, dtype)
    return geometry.relative_depth(window, size, dtype)


def _assignment(seeing: Seeing, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """g_k (N, K, taps, Hout, Wout), without scales.

    Also which taps lie on the map (1, 1, taps, Hout, Wout), and where depth is known (N, 1, taps, Hout, Wout).
    """
    layer, (height, width) = seeing.layer, geometry.depth.shape[-2:]
    size = (math.ceil(height / seeing.rate), math.ceil(width / seeing.rate))
    seen = _differences(layer, geometry, layer.window, size)
    g = layer.receptive_field(seen.value).transpose(0, 1)  # type: ignore[operator]
    inside = torch.cat(list(layer.window.views(torch.ones(1, 1, *size))), dim=1)
    return handle_invalid(g, seen.valid, layer.invalid), inside[:, None], seen.valid[:, None]


@torch.no_grad()
def kernel_shares(layers: Sequence[Seeing], samples: Iterable[Sample]) -> list[tuple[Array, Array]]:
    """Of each malleable layer the shares (K,) of what all its kernels take, before and after rebalancing.

    Counted are the sums of g_k and of s_k · g_k over all pixels and taps on the map. A tap without depth counts as the
    layer's ``invalid`` says.
    """
    sums = [torch.zeros(seeing.layer.kernels, dtype=torch.float64) for seeing in layers]
    for sample in samples:
        geometry = _geometry(sample)
        for total, seeing in zip(sums, layers, strict=True):
            g, inside, _ = _assignment(seeing, geometry)
            total += (g * inside).sum((0, 2, 3, 4), dtype=torch.float64)
    shares = []
    for total, seeing in zip(sums, layers, strict=True):
        assert isinstance(seeing.layer, MalleableConv2d)
        rebalanced = total * seeing.layer.scales
        shares.append((_numpy(total / total.sum()), _numpy(rebalanced / rebalanced.sum())))
    return shares


@torch.no_grad()
def contributions(net: nn.Module, layer: DepthConv2d, sample: Sample) -> Array:
    """What each kernel of ``layer`` adds to its output for ``sample``: (K, C, Hout, Wout), all but the bias."""
    seen: list[tuple[Tensor, Geometry]] = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(args))
    try:
        batch = collate([eval_transform()(sample)])
        net(batch.image, depth=batch.depth, focal=batch.focal)
    finally:
        handle.remove()
    x, geometry = seen[0]
    assign = layer.assign(geometry, x.shape[-2:], torch.promote_types(x.dtype, torch.float32))
    parts = [
        depth_conv2d(x, weight, assign[:, k : k + 1], None, layer.stride, layer.padding, layer.dilation, layer.groups)
        for k, weight in enumerate(layer.weight.chunk(layer.kernels))
    ]
    return _numpy(torch.cat(parts))


def telling_channels(maps: Array) -> list[int]:
    """The channel of ``maps`` (C, H, W) that varies most, and of those that vary half as much the one least like it."""
    rows = maps.reshape(len(maps), -1)
    rows = rows - rows.mean(1, keepdims=True)
    spread = np.linalg.norm(rows, axis=1)
    first, lively = int(spread.argmax()), np.flatnonzero(spread >= spread.max() / 2)
    alike = np.abs(rows[lively] @ rows[first]) / np.maximum(spread[lively], np.finfo(rows.dtype).tiny)
    return sorted({first, int(lively[alike.argmin()])})


@dataclass(frozen=True)
class Neighbours:
    """The taps of one output pixel of a layer. ``centre`` and ``taps`` (T, 2) are (x, y) in the image.

    g: (K, T); inside: (T,) bool, the tap lies on the map.
    """

    centre: tuple[int, int]
    taps: Array
    g: Array
    inside: Array


@torch.no_grad()
def neighbours(seeing: Seeing, sample: Sample, pixel: tuple[int, int] | None = None) -> Neighbours:
    """Which neighbours each kernel of a layer takes at the output pixel nearest to ``pixel`` (x, y).

    By default where neighbours differ most in which kernel takes them, of the pixels whose whole window lies on the map
    and has depth; if there is none, of those whose window lies on the map.
    """
    g, inside, known = (part[0] for part in _assignment(seeing, _geometry(sample)))  # (K, taps, Hout, Wout), (1, …)
    window, (height, width) = seeing.layer.window, g.shape[-2:]
    left, _, top, _ = window.padding
    rows, columns = (  # of the image, (Hout, kh) and (Wout, kw)
        seeing.rate * (np.arange(length)[:, None] * stride - before + np.arange(kernel) * dilation)
        for length, stride, before, kernel, dilation in zip(
            (height, width), window.stride, (top, left), window.kernel_size, window.dilation, strict=True
        )
    )
    middle = divmod(window.centre, window.kernel_size[1])
    if pixel is None:
        differ = g.var(1, unbiased=False).sum(0)
        whole = 2 * inside[0].amin(0) + known[0].all(0)
        i, j = divmod(int(differ.masked_fill(whole < whole.amax(), -1).argmax()), width)
    else:
        i, j = (
            int(np.abs(positions[:, tap] - wanted).argmin())
            for positions, tap, wanted in zip((rows, columns), middle, pixel[::-1], strict=True)
        )
    x, y = np.meshgrid(columns[j], rows[i])
    return Neighbours(
        centre=(int(columns[j, middle[1]]), int(rows[i, middle[0]])),
        taps=np.stack([x.ravel(), y.ravel()], axis=1),
        g=_numpy(g[:, :, i, j]),
        inside=_numpy(inside[0, :, i, j]) > 0,
    )


def _geometry(sample: Sample) -> Geometry:
    return Geometry(sample.depth.as_subclass(Tensor)[None], sample.camera.focal)


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()
