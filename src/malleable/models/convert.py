"""Put the layers into a network that already exists."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from malleable.geometry import Geometry, check_smooth_depth
from malleable.layers import Conv25d, DepthAwareConv2d, DepthConv2d, MalleableConv2d
from malleable.models.depth_input import DepthInput, Kind
from malleable.models.own_forward import plain_inside
from malleable.models.slot import Slot
from malleable.models.stages import Watched
from malleable.models.watch import sees_neighbours, watch
from malleable.ops.window import whole_number

CONVOLUTIONS: dict[str, type[DepthConv2d]] = {
    "malleable": MalleableConv2d,
    "conv25d": Conv25d,
    "depth_aware": DepthAwareConv2d,
}
"""What ``conv`` may be, besides None."""

REPEATED = {"weight": "weight", "standardise.gain": "gain"}
"""What a layer has once for every kernel, and what the convolution before it calls the same."""

Where = str | Sequence[str] | Callable[[str, nn.Conv2d], bool]

_DEFAULT_KERNELS = 3

_OF_CONV2D = frozenset(vars(nn.Conv2d(1, 1, 1, device="meta")))
"""What every convolution has."""


@dataclass(frozen=True)
class Placed:
    """Names a layer that conversion put into a network; :meth:`Converted.layers` has the layer itself."""

    name: str  # as in the network that was converted
    stage: str | None  # "res2" … "res5"; None if not known
    rate: float | None  # of the map it reads; None if not known


class Converted(nn.Module):
    """Is called as ``model`` is, plus ``depth=`` and ``focal=``, and answers as it does.

    :func:`convert` makes it. Parameters are those of ``model``, under ``model.`` in the state dict.
    """

    missed: tuple[float, ...] = ()  # rates of the network on its way down at which no layer was placed
    fill_depth = False  # unknown depth is interpolated before anything sees it
    smooth_depth = 0  # and depth passed through so many medians

    def __init__(self, model: nn.Module, placed: Iterable[Placed] = (), depth_input: DepthInput | None = None) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.placed = tuple(placed)
        self._slot = Slot()
        self.depth_input = depth_input
        if depth_input is not None:
            depth_input.widen(model.get_submodule(depth_input.name), self._slot)
        for layer in self.layers().values():
            layer.register_forward_pre_hook(self._slot.supply, with_kwargs=True)

    def layers(self) -> dict[str, DepthConv2d]:
        """Return the placed layers in the order of ``placed``, named as in ``model``."""
        return {placed.name: cast(DepthConv2d, self.model.get_submodule(placed.name)) for placed in self.placed}

    def forward(
        self, *args: Any, depth: Tensor | None = None, focal: float | Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Return the model's own output for its own arguments.

        Args:
            depth: (N, 1, H, W) metres, at the resolution of the image.
            focal: pixels of that image; a number or (N,).
        """
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim == 4]
        return self.run(self.geometry(inputs[0] if inputs else None, depth, focal), *args, **kwargs)

    def geometry(self, image: Tensor | None, depth: Tensor | None, focal: float | Tensor | None) -> Geometry | None:
        """Make what the layers see of ``image``, if it is known; None if nothing of the network sees depth."""
        if not self.placed and self.depth_input is None:
            return None
        if not self.placed:
            focal = 1.0  # depth as an input has no use for it
        if depth is None or focal is None:
            missing = "depth" if depth is None else "focal"
            raise ValueError(f"{missing} is missing: call net(image, depth=depth, focal=focal)")
        if image is not None and image.shape[-2:] != depth.shape[-2:]:  # rates would be wrong
            resolution, given = tuple(image.shape[-2:]), tuple(depth.shape[-2:])
            raise ValueError(f"depth must have the resolution of the image, {resolution}, got {given}")
        return Geometry(depth, focal).prepared(self.fill_depth, self.smooth_depth)

    def run(self, geometry: Geometry | None, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own output for its own arguments, while its layers see ``geometry``."""
        if geometry is None:
            return self.model(*args, **kwargs)
        slot = self._slot
        outer, slot.geometry = slot.geometry, geometry
        try:
            output = self.model(*args, **kwargs)
        finally:
            slot.geometry = outer
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            slot.replay(output, geometry)
        return output

    def original_state(self) -> dict[str, Tensor]:
        """Return the state dict of the network before conversion, with the weights of each layer's first kernel."""
        state = dict(self.model.state_dict())
        for prefix, layer in self._prefixed_layers():
            own = layer.state_dict()
            for key in own.keys() - {"weight", "bias"}:
                del state[prefix + key]
            state |= {f"{prefix}{name}": own[key][: layer.out_channels] for key, name in REPEATED.items() if key in own}
        return state

    def load_original(self, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of the network before conversion: weights go into every kernel (paper, 3.3)."""
        state = dict(state)
        for prefix, layer in self._prefixed_layers():
            own = layer.state_dict()
            names = {key: f"{prefix}{name}" for key, name in REPEATED.items() if key in own}
            given = {key: state.pop(name) for key, name in names.items() if name in state}
            added = {prefix + key: value for key, value in own.items() if key not in {"bias", *REPEATED}}
            repeated = {prefix + key: torch.cat([value] * layer.kernels) for key, value in given.items()}
            state = {**added, **state, **repeated}
        self.model.load_state_dict(state)

    def _prefixed_layers(self) -> list[tuple[str, DepthConv2d]]:
        """List the placed layers by every prefix that they have in the state dict; the network itself has none."""
        modules = self.model.named_modules(remove_duplicate=False)
        return [(f"{name}." if name else "", module) for name, module in modules if isinstance(module, DepthConv2d)]


def convert(
    model: nn.Module,
    conv: str | None = "malleable",
    kernels: int = _DEFAULT_KERNELS,
    where: Where = "first-of-stage",
    depth_input: Kind | None = None,
    *,
    fill_depth: bool = False,
    smooth_depth: int = 0,
    example: Tensor | None = None,
    **options: Any,
) -> Converted:
    """Copy ``model`` and let its convolutions see depth, starting as the network it was.

    Pretrained weights go into every kernel. In eval mode, on flat or missing depth, the output is that of ``model``.

    Args:
        model: any network that takes images; it is left as it is.
        conv: ``"malleable"``, ``"conv25d"``, ``"depth_aware"``, or None, which replaces nothing: an RGB baseline that
            is called in the same way.
        kernels: K. Depth-aware convolution has one kernel whatever the default says.
        where: ``"first-of-stage"`` (the first k × k, k > 1, convolution of every stage on the way down, of its first
            residual unit if it has any, as in the paper), ``"all"`` (every k × k, k > 1), names or globs of modules
            (``["layer4.*.conv2"]``), or ``f(name, conv2d) -> bool``.
        depth_input: also show depth to the first convolution as one more channel, whose weights start at zero:
            ``"metric"`` in metres, ``"relative"`` to the image's median depth, which needs no unit. Works with every
            ``conv``, None included.
        fill_depth: interpolate unknown depth from what is known around it, as :meth:`malleable.Geometry.filled` does.
            Images without any depth stay as they are.
        smooth_depth: passes of a median over every 3 × 3 pixels of depth, against noise, see
            :meth:`malleable.Geometry.smoothed`.
        example: image batch (N, C, H, W) to find stages and rates with, if no blank one of 128 × 128, of the size that
            the network names itself, of 224 × 224 or 256 × 256 suits it.
        options: for the layers, for example ``temperature=2.0`` or ``invalid="ignore"``.

    Warns if the network has rates at which ``"first-of-stage"`` finds nothing to replace.

    Example:
        >>> import timm, torch, malleable as mb
        >>> net = mb.convert(timm.create_model("resnet18", pretrained=False))
        >>> net(torch.rand(2, 3, 64, 96), depth=1 + torch.rand(2, 1, 64, 96), focal=100.0).shape
        torch.Size([2, 1000])
    """
    if isinstance(model, Converted) or any(isinstance(m, DepthConv2d) for m in model.modules()):
        raise ValueError("model already has depth-seeing convolutions; convert the original network instead")
    check_options(conv, options)
    smooth_depth = check_smooth_depth(smooth_depth)
    if conv is None and depth_input is None:
        return Converted(copy.deepcopy(model))
    seen, failure = None, None
    try:
        seen = watch(model, example)
    except Exception as error:  # foreign code may fail in any way; it matters only if the stages are asked for
        failure = error
    names = [] if conv is None else _select(model, where, seen, failure)
    placed = [Placed(name, None, seen.rate(name) if seen else None) for name in names]
    kind, model = type(model).__name__, copy.deepcopy(model)
    net = place(model, placed, conv, kernels, options, add_depth_input(depth_input, model, seen, failure), seen)
    net.fill_depth, net.smooth_depth = fill_depth, smooth_depth
    idle = [name for name in names if seen and name not in seen.convolutions]
    if idle:
        warnings.warn(
            f"{kind} did not run {', '.join(idle[:3])}{' and others' if len(idle) > 3 else ''} on an example image; "
            "leave them out with where=, unless they run in training or on other images: a network that only uses "
            "their weights would get those of all kernels",
            stacklevel=2,
        )
    if seen and conv is not None and where == "first-of-stage":
        net.missed = tuple(seen.missed(names))
        if net.missed:
            rates = ", ".join(f"{rate:g}" for rate in net.missed)
            warnings.warn(
                f"{kind} has no k × k convolution to replace at rate {rates}: depth is seen at "
                f"{', '.join(f'{layer.name} (rate {layer.rate:g})' for layer in placed)} only",
                stacklevel=2,
            )
    return net


def place(
    model: nn.Module,
    placed: Sequence[Placed],
    conv: str | None,
    kernels: int,
    options: dict[str, Any],
    depth_input: DepthInput | None = None,
    seen: Watched | None = None,
) -> Converted:
    """Put a layer in each of the places ``placed`` of ``model`` itself, which pads maps as was ``seen``."""
    if conv is None:
        return Converted(model, (), depth_input)
    check_kernels(conv, kernels)
    if conv != "depth_aware":
        options = {"kernels": kernels, **options}
    for at in placed:
        ran = seen.convolutions.get(at.name) if seen else None
        if ran and any(ran.pads) and ran.mode != "zeros":
            raise ValueError(
                f"cannot convert {at.name}: the network pads its input in mode {ran.mode!r}; only zeros can be "
                "honoured, so leave it out with where=, or have the convolution itself pad with zeros"
            )
        if seen and ran and any(ran.pads) and seen.padded_at(at.name) is None:
            warnings.warn(
                f"the network pads a map of {ran.reads} pixels before {at.name}, at no whole rate of its image, "
                f"{seen.image}: depth will lie beside the features there, by up to a pixel of that map; leave the "
                "layer out with where= if that is too far",
                stacklevel=3,
            )
        _replace(model, at.name, CONVOLUTIONS[conv], options)
    net = Converted(model, placed, depth_input)
    if seen:
        for name, layer in net.layers().items():
            layer.padded_at, layer.padded_before = seen.padded_at(name), seen.padded_before(name)
    return net


def check_options(conv: str | None, options: Iterable[str]) -> None:
    """Refuse a ``conv`` that is none, and options that no layer has."""
    if conv is not None and conv not in CONVOLUTIONS:
        raise ValueError(f"conv must be None or one of {', '.join(map(repr, CONVOLUTIONS))}, got {conv!r}")
    known = {name for layer in CONVOLUTIONS.values() for name in signature(layer).parameters}
    unknown = sorted(set(options) - (known - signature(nn.Conv2d).parameters.keys()))
    if unknown:
        raise TypeError(f"there is no option {', '.join(map(repr, unknown))}")


def check_kernels(conv: str | None, kernels: int) -> int:
    """Return ``kernels``, or refuse what ``conv`` cannot have; depth_aware leaves the default of the others aside."""
    if conv == "depth_aware" and kernels not in (1, _DEFAULT_KERNELS):
        raise ValueError(f"kernels must be 1 for conv='depth_aware', which has a single kernel, got {kernels}")
    return kernels if conv is None else whole_number("kernels", kernels, 1)


def add_depth_input(
    kind: Kind | None, model: nn.Module, seen: Watched | None, failure: Exception | None = None
) -> DepthInput | None:
    """Make the channel of depth for the convolution of ``model`` that runs first."""
    if kind is None:
        return None
    if seen is None or not seen.convolutions:
        reason = f"which failed ({type(failure).__name__}: {failure})" if failure else "and found none"
        raise ValueError(
            f"depth_input={kind!r} runs the network on an example image to find its first k × k convolution, {reason}; "
            "pass example=, a batch it accepts"
        ) from failure
    first = next(iter(seen.convolutions))
    if any(seen.convolutions[first].pads):
        raise ValueError(
            f"depth_input={kind!r}: the network pads the image before {first}, its first convolution, and a channel of "
            "depth would not fit; leave depth_input out"
        )
    return DepthInput(kind, model.get_submodule(first), first)


def _select(model: nn.Module, where: Where, seen: Watched | None, failure: Exception | None) -> list[str]:
    """Find the names of the convolutions to replace."""
    candidates = {name: module for name, module in model.named_modules() if sees_neighbours(module)}
    kind = type(model).__name__
    if where == "first-of-stage":
        if seen is None:
            raise ValueError(
                "where='first-of-stage' runs the network on an example image to find its stages, which failed "
                f"({type(failure).__name__}: {failure}); pass example=, a batch it accepts, or name the convolutions"
            ) from failure
        names = seen.first_of_stages()
        if names and len(missed := seen.missed(names)) > len(names):
            rates = ", ".join(f"{rate:g}" for rate in missed)
            raise ValueError(
                f"where={where!r} finds only {', '.join(names)} to replace in {kind}, nothing at rate {rates}; pass "
                f"where={names} if that is enough for you, or other names, globs or a function"
            )
    elif where == "all":
        names = list(candidates)
    elif callable(where):
        names = [name for name, module in candidates.items() if where(name, module)]
    else:
        patterns = [where] if isinstance(where, str) else list(where) if isinstance(where, Iterable) else [where]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"where must be 'first-of-stage', 'all', names, globs or a function, got {where!r}")
        first = {module: name for name, module in candidates.items()}  # of the names that a module has
        every = {name: first[m] for name, m in model.named_modules(remove_duplicate=False) if m in first}
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in every):
                raise ValueError(f"where: {pattern!r} matches no k × k convolution, k > 1, of {kind}")
        chosen = {every[name] for name in every if any(fnmatchcase(name, pattern) for pattern in patterns)}
        names = [name for name in candidates if name in chosen]
    if not names:
        raise ValueError(
            f"where={where!r} finds nothing to replace in {kind}, which has {len(candidates)} k × k, k > 1, "
            f"convolutions{_offer(seen)}; where may also be 'all', names, globs or a function"
        )
    return names


def _offer(seen: Watched | None) -> str:
    """Name a few convolutions that could be replaced, one for every rate."""
    if seen is None or not seen.convolutions:
        return ""
    first: dict[float | None, str] = {}
    for name in seen.convolutions:
        first.setdefault(seen.rate(name), name)
    offered = ", ".join(f"{name!r} (rate {rate:g})" for rate, name in first.items())
    return f", of which none begins a stage on the way down; of those that ran, one for every rate: {offered}"


def _replace(model: nn.Module, name: str, layer_type: type[DepthConv2d], options: dict[str, Any]) -> None:
    """Make convolution ``name`` of ``model`` a depth-seeing layer.

    It stays the object that it was: a network may hold it in a list or a dict too, where no search would find it.
    """
    conv2d = model.get_submodule(name)
    for other, module in model.named_modules():
        for kind in ("weight", "bias"):
            own = conv2d._parameters.get(kind)
            if own is not None and module is not conv2d and any(own is value for value in module._parameters.values()):
                raise ValueError(
                    f"cannot convert {name}: it shares its {kind} with {other}; give it one of its own first"
                )
    marks = {key: value for key, value in vars(conv2d).items() if type(conv2d) is nn.Conv2d and key not in _OF_CONV2D}
    try:
        layer = _layer_like(cast(nn.Conv2d, conv2d), layer_type, options)
        conv2d.__class__ = type(layer)
    except (TypeError, ValueError) as error:
        raise type(error)(f"cannot convert {name}: {error}") from error
    marks = {key: value for key, value in marks.items() if not hasattr(layer, key)}
    conv2d.__dict__ = {**marks, **layer.__dict__}  # what others have marked a plain convolution with stays


def _layer_like(conv2d: nn.Conv2d, layer_type: type[DepthConv2d], options: dict[str, Any]) -> DepthConv2d:
    """Make a layer that starts as ``conv2d``, and pads and standardises as it does if it has a forward for that."""
    inside = None if type(conv2d).forward is nn.Conv2d.forward else plain_inside(conv2d)
    if inside is None:
        return layer_type.from_conv2d(conv2d, **options)
    layer = layer_type.from_conv2d(inside.conv2d, **options)
    if inside.pads == "same":
        layer.pads_same = True
    else:
        layer.window = layer.window.padded(inside.pads)
    if inside.standardise is not None:
        layer.standardise = inside.standardise.for_kernels(layer.kernels)
    return layer
