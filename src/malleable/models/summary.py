"""Say what was replaced in a network, at which rate, and what it adds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from malleable.layers import DepthAwareConv2d, DepthConv2d
from malleable.models.convert import CONVOLUTIONS, REPEATED, Converted
from malleable.models.depth_input import DepthEncoder, DepthInput


@dataclass(frozen=True)
class Replaced:
    """Describes one depth-seeing layer of a network."""

    name: str
    kind: str  # "malleable", "conv25d" or "depth_aware"
    rate: float | None  # of the map it reads; None if not known
    kernels: int
    parameters: int
    added: int  # parameters on top of those of the convolution it replaced


@dataclass(frozen=True)
class Summary:
    """Lists the depth-seeing layers of a network in the order they are registered; ``print`` shows a table."""

    layers: tuple[Replaced, ...]
    missed: tuple[float, ...] = ()  # rates at which conversion found no convolution to replace

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "convolution", "rate", "kernels", "parameters", "added")]
        for layer in self.layers:
            rate = "?" if layer.rate is None else f"{layer.rate:g}"
            numbers = (str(layer.kernels), f"{layer.parameters:,}", f"{layer.added:,}")
            rows.append((layer.name, layer.kind, rate, *numbers))
        totals = (sum(layer.parameters for layer in self.layers), sum(layer.added for layer in self.layers))
        rows.append((f"{len(self.layers)} layers", "", "", "", *(f"{total:,}" for total in totals)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = "<<>>>>"
        lines = [
            "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True)).rstrip()
            for row in rows
        ]
        if self.missed:
            lines.append(f"no convolution to replace at rate {', '.join(f'{rate:g}' for rate in self.missed)}")
        return "\n".join(lines)


def summary(net: nn.Module) -> Summary:
    """List the depth-seeing layers of ``net``, a converted network or one that contains any.

    Rates are those of the image that :func:`malleable.models.convert` tried the network with.

    Example:
        >>> import torch, malleable as mb
        >>> net = torch.nn.Sequential(mb.MalleableConv2d(8, 8, 3))
        >>> [(layer.name, layer.kernels) for layer in mb.summary(net).layers]
        [('0', 3)]
    """
    networks = [module for module in net.modules() if isinstance(module, Converted)]
    rates = {
        id(layer): placed.rate
        for converted in networks
        for placed, layer in zip(converted.placed, converted.layers().values(), strict=True)
    }
    layers = []
    for name, layer in net.named_modules():
        if isinstance(layer, DepthConv2d):
            kinds = (kind for kind, layer_type in CONVOLUTIONS.items() if isinstance(layer, layer_type))
            kind = next(kinds, type(layer).__name__)
            counts = {name: parameter.numel() for name, parameter in layer.named_parameters()}
            parameters = sum(counts.values())
            original = sum(counts.get(name, 0) for name in REPEATED) // layer.kernels + counts.get("bias", 0)
            added = parameters - original
            layers.append(Replaced(name, kind, rates.get(id(layer)), layer.kernels, parameters, added))
    return Summary(tuple(layers), tuple(rate for converted in networks for rate in converted.missed))


def sees_depth(net: nn.Module) -> bool:
    """Tell whether depth has any effect on ``net``."""
    return any(isinstance(module, DepthConv2d | DepthInput | DepthEncoder) for module in net.modules())


def is_scale_free(net: nn.Module) -> bool:
    """Tell whether ``net`` gives the same answer for depth times any factor, so that it needs no unit of depth.

    In Eq. 1 the scale cancels, and the relative channel has none; depth-aware convolution and the metric channel take
    metres.
    """
    channels = DepthInput | DepthEncoder
    return not any(
        isinstance(module, DepthAwareConv2d) or (isinstance(module, channels) and module.kind == "metric")
        for module in net.modules()
    )
