"""Finds out what depth-seeing layers do with depth: their receptive fields, and which kernel takes what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from malleable.assign import handle_invalid, malleable_logits
from malleable.data.sample import Sample, collate
from malleable.data.transforms import eval_transform
from malleable.figures.curves import Assigning, Field
from malleable.figures.pictures import Neighbours
from malleable.figures.style import Array
from malleable.geometry import Geometry, grid_unit
from malleable.layers import Conv25d, DepthAwareConv2d, DepthConv2d, MalleableConv2d
from malleable.models.convert import Converted, Placed
from malleable.ops.depth_conv2d import convolve
from malleable.ops.window import Window


@dataclass(frozen=True)
class Seeing(Placed):
    """Holds a placed layer together with its place, which is known; a stage without a name has that of its layer."""

    stage: str
    rate: int
    layer: DepthConv2d
    fill_depth: bool = False
    smooth_depth: int = 0

    @property
    def title(self) -> str:
        """Name stage and layer."""
        return self.name if self.stage == self.name else f"{self.stage}, {self.name}"

    @property
    def centers(self) -> Array:
        """Tell where each kernel looks, (K,): learned centers, or the middles of the cells of a 2.5D convolution."""
        if isinstance(self.layer, MalleableConv2d):
            return _numpy(self.layer.centers)[1:-1]
        return np.arange(self.layer.kernels) - (self.layer.kernels - 1) / 2


def seeing_layers(net: nn.Module) -> list[Seeing]:
    """List the depth-seeing layers of ``net`` whose rate is known, from res2 to res5 or else in the order they stand.

    There are none in an RGB baseline.
    """
    found = [
        Seeing(
            placed.name,
            placed.stage or placed.name,
            int(placed.rate),
            layer,
            converted.fill_depth,
            converted.smooth_depth,
        )
        for converted in net.modules()
        if isinstance(converted, Converted)
        for placed, layer in zip(converted.placed, converted.layers().values(), strict=True)
        if placed.rate is not None and placed.rate == int(placed.rate)
    ]
    named = any(seeing.stage != seeing.name for seeing in found)
    return sorted(found, key=lambda seeing: seeing.stage) if named else found


@torch.no_grad()
def assigning(d: Array, centers: Sequence[float], temperature: float) -> Assigning:
    """Evaluate h_0 … h_{K+1} and g_1 … g_K at relative differences ``d`` (D,), in float64."""
    a = torch.tensor(centers, dtype=torch.float64)
    h = malleable_logits(torch.from_numpy(d)[None].double(), a, temperature)[0]
    return Assigning(d, h.numpy(), h.softmax(0)[1:-1].numpy(), np.array(centers), temperature)


@torch.no_grad()
def receptive_field(seeing: Seeing, depth: float, focal: float, metres: Array) -> Array:
    """Evaluate g_k (K, D) at neighbours that lie ``metres`` (D,) behind a center pixel at ``depth``.

    NaN stands for neighbours that would be behind the camera.
    """
    layer = seeing.layer
    in_metres = isinstance(layer, DepthAwareConv2d)
    unit = 1.0 if in_metres else grid_unit(depth, focal, seeing.rate, layer.dilation)
    g = layer.receptive_field(torch.from_numpy(-metres / unit))
    return np.where(depth + metres > 0, g.numpy(), np.nan)


def fields_in_metres(
    methods: Mapping[str, Sequence[Seeing]], depth: float, focal: float
) -> dict[str, dict[str, Field]]:
    """Evaluate the receptive fields of ``methods``: method → stage → field.

    All methods of a stage are looked at over the same metres.
    """
    reach: dict[str, float] = {}
    for seeing in (seeing for layers in methods.values() for seeing in layers):
        outermost = float(np.abs(seeing.centers).max()) + 2.5  # grid cells
        far = outermost * grid_unit(depth, focal, seeing.rate, seeing.layer.dilation)
        reach[seeing.stage] = max(far, reach.get(seeing.stage, 0.0))
    metres = {stage: np.linspace(-far, far, 401) for stage, far in reach.items()}
    return {
        name: {s.stage: Field(m := metres[s.stage], receptive_field(s, depth, focal, m), s.centers) for s in layers}
        for name, layers in methods.items()
    }


def forerunners(layers: Sequence[Seeing]) -> dict[str, list[Seeing]]:
    """Put depth-aware and 2.5D convolutions, as they are by default, in the places of ``layers``."""
    placed: dict[str, list[Seeing]] = {"depth_aware": [], "conv25d": []}
    for seeing in layers:
        layer = seeing.layer
        window = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        placed["depth_aware"].append(replace(seeing, layer=DepthAwareConv2d(1, 1, *window)))
        placed["conv25d"].append(replace(seeing, layer=Conv25d(1, 1, *window, kernels=layer.kernels)))
    return placed


def _assignment(seeing: Seeing, geometry: Geometry) -> tuple[Window, Tensor, Tensor, Tensor]:
    """Evaluate g_k (N, K, taps, Hout, Wout), without scales, for the window that the layer has on this geometry's map.

    Also which taps lie on the map (1, 1, taps, Hout, Wout), and where depth is known (N, 1, taps, Hout, Wout).
    """
    layer, (height, width) = seeing.layer, geometry.depth.shape[-2:]
    size = (math.ceil(height / seeing.rate), math.ceil(width / seeing.rate))
    window, size = layer.view(geometry, size)
    metres = isinstance(layer, DepthAwareConv2d)
    seen = (geometry.depth_difference if metres else geometry.relative_depth)(window, size)
    g = layer.receptive_field(seen.value).transpose(0, 1)
    inside = torch.cat(list(window.views(torch.ones(1, 1, *size))), dim=1)
    return window, handle_invalid(g, seen.valid, layer.invalid), inside[:, None], seen.valid[:, None]


@torch.no_grad()
def kernel_shares(layers: Sequence[Seeing], samples: Iterable[Sample]) -> list[tuple[Array, Array]]:
    """Count the share (K,) that each kernel of each malleable layer takes, before and after rebalancing.

    Counted are the sums of g_k and of s_k · g_k over all pixels and taps on the map. A tap without depth counts as the
    layer's ``invalid`` says.
    """
    sums = [torch.zeros(seeing.layer.kernels, dtype=torch.float64) for seeing in layers]
    for sample in samples:
        prepared: dict[tuple[bool, int], Geometry] = {}
        for total, seeing in zip(sums, layers, strict=True):
            key = seeing.fill_depth, seeing.smooth_depth
            if key not in prepared:
                prepared[key] = geometry_of(sample, *key)
            _, g, inside, _ = _assignment(seeing, prepared[key])
            total += (g * inside).sum((0, 2, 3, 4), dtype=torch.float64)
    shares = []
    for total, seeing in zip(sums, layers, strict=True):
        assert isinstance(seeing.layer, MalleableConv2d)
        rebalanced = total * seeing.layer.scales
        shares.append((_numpy(total / total.sum()), _numpy(rebalanced / rebalanced.sum())))
    return shares


@torch.no_grad()
def contributions(net: nn.Module, layer: DepthConv2d, sample: Sample) -> Array:
    """Compute what each kernel of ``layer`` adds to its output for ``sample``: (K, C, Hout, Wout), all but the bias."""
    seen: list[tuple[Tensor, Geometry]] = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(args))
    try:
        batch = collate([eval_transform()(sample)])
        net(batch.image, depth=batch.depth, focal=batch.focal)
    finally:
        handle.remove()
    x, geometry = seen[0]
    assign = layer.assign(geometry, x.shape[-2:], torch.promote_types(x.dtype, torch.float32))
    x, window = layer.crop(x, geometry)
    weights = layer.effective_weight().chunk(layer.kernels)
    parts = [convolve(x, weight, assign[:, k : k + 1], None, window, layer.groups) for k, weight in enumerate(weights)]
    return _numpy(torch.cat(parts))


def telling_channels(maps: Array) -> list[int]:
    """Find the channel of ``maps`` (C, H, W) that varies most, and of those half as lively the one least like it."""
    rows = maps.reshape(len(maps), -1)
    rows = rows - rows.mean(1, keepdims=True)
    spread = np.linalg.norm(rows, axis=1)
    first, lively = int(spread.argmax()), np.flatnonzero(spread >= spread.max() / 2)
    alike = np.abs(rows[lively] @ rows[first]) / np.maximum(spread[lively], np.finfo(rows.dtype).tiny)
    return sorted({first, int(lively[alike.argmin()])})


@torch.no_grad()
def neighbours(seeing: Seeing, sample: Sample, pixel: tuple[int, int] | None = None) -> Neighbours:
    """Find the neighbours that each kernel of a layer takes at the output pixel nearest to ``pixel`` (x, y).

    By default where neighbours differ most in which kernel takes them, of the pixels whose whole window lies on the map
    and has depth; if there is none, of those whose window lies on the map.
    """
    window, *parts = _assignment(seeing, geometry_of(sample, seeing.fill_depth, seeing.smooth_depth))
    g, inside, known = (part[0] for part in parts)  # (K, taps, Hout, Wout), (1, …)
    height, width = g.shape[-2:]
    left, _, top, _ = window.padding
    rows, columns = (  # of the image, (Hout, kh) and (Wout, kw)
        seeing.rate * (np.arange(length)[:, None] * stride - before + np.arange(kernel) * dilation)
        for length, stride, before, kernel, dilation in zip(
            (height, width), window.stride, (top, left), window.kernel_size, window.dilation, strict=True
        )
    )
    middle = divmod(window.center, window.kernel_size[1])
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
        pixel=(int(columns[j, middle[1]]), int(rows[i, middle[0]])),
        taps=np.stack([x.ravel(), y.ravel()], axis=1),
        g=_numpy(g[:, :, i, j]),
        inside=_numpy(inside[0, :, i, j]) > 0,
    )


def geometry_of(sample: Sample, fill_depth: bool, smooth_depth: int) -> Geometry:
    """Give a network what it sees of the depth of ``sample``, filled and smoothed if it does so."""
    geometry = Geometry(sample.depth.as_subclass(Tensor)[None], sample.camera.focal)
    return geometry.prepared(fill_depth, smooth_depth)


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()
