"""Depth as one more channel of a network's first convolution, besides what its layers make of it."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from malleable.geometry import Geometry
from malleable.models.own_forward import Pads, plain_inside
from malleable.models.slot import Slot
from malleable.ops.direct import is_exporting
from malleable.ops.window import same_padding

Kind = Literal["metric", "relative"]

_METRES = 4.0  # of the metric channel's 1: rooms are about that deep


def input_names(depth_input: Kind | None, depth_encoder: Kind | None) -> list[str]:
    """Name what shows depth to a network besides its layers."""
    channel = [] if depth_input is None else [f"{depth_input} channel"]
    return channel if depth_encoder is None else [*channel, "second encoder"]


class DepthInput(nn.Module):
    """Widens a network's first convolution by a channel of depth, whose weights start at zero.

    The channel has a convolution of its own, plain and without hooks, that reads what the first one reads, and the two
    outputs are added: the same sum over four channels. Where a network standardises its weights, those of the channel
    are left as they are: their zeros would come to full strength with the first step.

    Args:
        kind: see :func:`depth_channel`.
        conv: the network's first convolution, which may be replaced before :meth:`widen` is called.
        name: of ``conv`` in the network.
    """

    def __init__(self, kind: Kind, conv: nn.Module, name: str) -> None:
        super().__init__()
        _check(kind, "depth_input")
        first = f"depth_input={kind!r}: {name}, the first convolution,"
        if not isinstance(conv, nn.Conv2d) or conv.groups != 1:
            raise ValueError(f"{first} has groups and cannot be widened")
        if "forward" in vars(conv):
            raise ValueError(f"{first} has had its forward replaced")
        if "weight" not in conv._parameters:
            raise ValueError(f"{first} has a parametrized weight; un-parametrize it before conversion")
        self.kind, self.name, self.slot = kind, name, Slot()
        self.pads: Pads | Literal["same"] | None = None  # around the channel, if the first one pads in its own forward
        names = ("out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
        same: dict[str, Any] = {name: getattr(conv, name) for name in names}
        if type(conv).forward is not nn.Conv2d.forward or type(conv)._conv_forward is not nn.Conv2d._conv_forward:
            inside = plain_inside(conv)
            if inside is None:
                raise ValueError(f"{first} is a {type(conv).__name__}, which computes its output in its own way")
            self.pads = inside.pads
            same |= {"padding": 0, "padding_mode": "zeros"}
        self.conv = nn.Conv2d(1, **same, bias=False, device="meta")  # where no random numbers are drawn
        self.conv.weight = nn.Parameter(torch.zeros_like(conv.weight[:, :1]))

    def widen(self, conv: nn.Module, slot: Slot) -> None:
        """Have ``conv`` add this channel to its output, with the geometry of ``slot``.

        Its class changes, its parameters and their names do not. A forward hook would do the same, but compilers do not
        look at hooks when they take a network for another that they have compiled.
        """
        self.slot = slot
        conv.__class__ = _widened(type(conv))
        conv.depth_input = (self,)  # type: ignore[assignment]  # no child: the converted network has its weights

    def forward(self, x: Tensor) -> Tensor:
        """Return what the channel adds to the convolution of x (N, C, H, W), at any rate of the geometry's image."""
        depth, _ = self.slot.current().depth_at(x.shape[-2:])
        if depth.shape[0] != x.shape[0]:  # a sum would be broadcast
            raise ValueError(
                f"depth has a batch of {depth.shape[0]} maps, but {self.name}, the first convolution, a batch of "
                f"{x.shape[0]} samples; give every image its own depth map"
            )
        channel = depth_channel(depth, self.kind).to(x.dtype)
        if self.pads == "same":
            conv = self.conv
            channel = F.pad(channel, same_padding(x.shape[-2:], conv.kernel_size, conv.stride, conv.dilation))
        elif self.pads is not None:
            channel = F.pad(channel, self.pads)
        added: Tensor = self.conv(channel)
        return added


class _Widened(nn.Module):
    """Goes before the class of a network's first convolution."""

    depth_input: tuple[DepthInput]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (depth_input,) = self.depth_input
        output: Tensor = super().forward(*args, **kwargs)
        added: Tensor = depth_input(next(iter((*args, *kwargs.values()))))
        return output + added

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        return _new_widened, (type(self).__bases__[1],), *reduced[2:]


_widened_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _widened(convolution: type[nn.Module]) -> type[nn.Module]:
    if convolution not in _widened_classes:
        _widened_classes[convolution] = type(f"{convolution.__name__}WithDepth", (_Widened, convolution), {})
    return _widened_classes[convolution]


def _new_widened(convolution: type[nn.Module]) -> nn.Module:
    kind = _widened(convolution)
    return kind.__new__(kind)


class DepthEncoder(nn.Module):
    """Is a second backbone that sees depth alone; a decoder adds its maps to those of the first, stage by stage.

    Args:
        kind: see :func:`depth_channel`.
        net: maps (N, 1, H, W) to a list of maps.
        fill_depth, smooth_depth: see :func:`malleable.convert`.
    """

    smooth_depth = 0  # of encoders that were pickled before there was any

    def __init__(self, kind: Kind, net: nn.Module, fill_depth: bool = False, smooth_depth: int = 0) -> None:
        super().__init__()
        _check(kind, "depth_encoder")
        self.kind, self.net, self.fill_depth, self.smooth_depth = kind, net, fill_depth, smooth_depth

    def forward(self, depth: Tensor) -> list[Tensor]:
        """Return the maps of ``depth`` (N, 1, H, W) metres, finest first."""
        geometry = Geometry(depth, 1.0).prepared(self.fill_depth, self.smooth_depth)
        known, _ = geometry.depth_at(depth.shape[-2:])
        maps: list[Tensor] = self.net(depth_channel(known, self.kind).to(next(self.net.parameters()).dtype))
        return maps


def _check(kind: str, argument: str) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"{argument} must be None, {' or '.join(map(repr, get_args(Kind)))}, got {kind!r}")


def depth_channel(depth: Tensor, kind: Kind) -> Tensor:
    """Turn depth (N, 1, H, W), 0 where it is unknown, into a channel of the same shape, 0 in the same places.

    ``"metric"`` is depth in units of 4 m. ``"relative"`` is log depth minus the median log depth of the image's known
    pixels, which no factor of depth changes.
    """
    if kind == "metric":
        return depth / _METRES
    known = depth > 0
    ratio = depth / _median(depth, known).clamp(min=torch.finfo(depth.dtype).tiny)
    return torch.where(known, ratio, 1.0).log()


def _median(depth: Tensor, known: Tensor) -> Tensor:
    """Return the median (N, 1, 1, 1) of the known pixels, the lower of the two in the middle; 0 without any."""
    flat = depth.flatten(1)
    if is_exporting():
        # ONNX has no median, but finds the half of smallest values without sorting them. For this half to end at the
        # median of the known pixels, as many unknown ones as there are too few below it count as 0, the others as inf.
        unknown = ~known.flatten(1)
        middle = (flat.shape[1] - 1) // 2
        below = middle - (flat.shape[1] - unknown.sum(1, keepdim=True) - 1) // 2
        filled = torch.where(unknown, torch.where(unknown.cumsum(1) <= below, 0.0, torch.inf), flat)
        median = filled.topk(middle + 1, dim=1, largest=False, sorted=False).values.amax(1)
        return torch.where(median < torch.inf, median, 0.0).view(-1, 1, 1, 1)
    median = torch.where(known.flatten(1), flat, torch.nan).nanmedian(dim=1).values
    return median.nan_to_num(0.0).view(-1, 1, 1, 1)
