"""Put the layers into a network that already exists.

Foreign code calls a layer as ``conv(x)``, so the geometry must come from beside the arguments. Rewriting the graph (FX)
fails on code it cannot trace; tags on tensors are dropped by the first operator; a global is shared by networks that
have nothing to do with each other. So every converted network owns one slot: its forward puts the geometry of the pass
there, and a forward pre-hook of each placed layer hands it on. Compilers trace through the slot and keep the plain data
flow. It holds one value per thread, and copies and pickles as an empty slot that the layers of the copy share.
Activation checkpointing runs layers again during backward: gradient hooks on the outputs then name the geometry of that
very pass. Autograd runs the nodes of a later pass before those of an earlier one, so even one backward over two passes
finds the right geometry for each. A layer that finds none says so; it never takes another pass's.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from malleable.geometry import Geometry
from malleable.layers import Conv25d, DepthAwareConv2d, DepthConv2d, MalleableConv2d
from malleable.models.stages import Watched, sees_neighbours, watch

CONVOLUTIONS: dict[str, type[DepthConv2d]] = {
    "malleable": MalleableConv2d,
    "conv25d": Conv25d,
    "depth_aware": DepthAwareConv2d,
}
"""What ``conv`` may be, besides None."""

Where = str | Sequence[str] | Callable[[str, nn.Conv2d], bool]

_DEFAULT_KERNELS = 3


class Slot(threading.local):
    """Holds the geometry of the running pass for the placed layers of one network."""

    def __init__(self) -> None:  # runs once in every thread that looks here
        self.geometry: Geometry | None = None  # of the forward pass that is running
        self.replayed: weakref.ref[Geometry] | None = None  # of the backward that is running; its graph owns it

    def __reduce__(self) -> tuple[type[Slot], tuple[()]]:
        return Slot, ()

    def supply(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Add the geometry to the arguments of a placed layer, as its forward pre-hook, unless the caller gave one."""
        given = (*args, *kwargs.values())  # nn.Conv2d calls its argument input, the layers theirs x
        return None if len(given) > 1 else ((*given, self._current()), {})

    def replay(self, outputs: Any, geometry: Geometry) -> None:
        """Have the backward of ``outputs`` find ``geometry``, should it run layers again."""

        def name_geometry(grad: Tensor) -> None:
            self.replayed = weakref.ref(geometry)

        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(name_geometry)  # type: ignore[no-untyped-call]

    def _current(self) -> Geometry:
        geometry = self.geometry
        if geometry is None and self.replayed is not None and _in_backward():
            geometry = self.replayed()
        if geometry is None:
            raise RuntimeError(
                "a converted layer was run outside a call of its network and has no depth; "
                "call net(image, depth=depth, focal=focal), not net.model or a part of it"
            )
        return geometry


def _in_backward() -> bool:
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint asks


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

    def __init__(self, model: nn.Module, placed: Iterable[Placed] = ()) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.placed = tuple(placed)
        self._slot = Slot()
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
        if not self.placed:
            return self.model(*args, **kwargs)
        if depth is None or focal is None:
            missing = "depth" if depth is None else "focal"
            raise ValueError(f"{missing} is missing: call net(image, depth=depth, focal=focal)")
        inputs = (*args, *kwargs.values())
        image = next((value for value in inputs if isinstance(value, Tensor) and value.ndim == 4), depth)
        if image.shape[-2:] != depth.shape[-2:]:  # rates would be wrong
            resolution, given = tuple(image.shape[-2:]), tuple(depth.shape[-2:])
            raise ValueError(f"depth must have the resolution of the image, {resolution}, got {given}")
        geometry = Geometry(depth, focal)
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
            for key in layer.state_dict().keys() - {"weight", "bias"}:
                del state[prefix + key]
            state[f"{prefix}weight"] = layer.weight.detach()[: layer.out_channels]
        return state

    def load_original(self, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of the network before conversion: weights go into every kernel (paper, 3.3)."""
        original = self.original_state()
        added = {key: value for key, value in self.model.state_dict().items() if key not in original}
        weights = {f"{prefix}weight": layer.kernels for prefix, layer in self._prefixed_layers()}
        repeated = {key: torch.cat([state[key]] * kernels) for key, kernels in weights.items() if key in state}
        self.model.load_state_dict({**added, **state, **repeated})

    def _prefixed_layers(self) -> list[tuple[str, DepthConv2d]]:
        """List the placed layers by every prefix that they have in the state dict; the network itself has none."""
        modules = self.model.named_modules(remove_duplicate=False)
        return [(f"{name}." if name else "", module) for name, module in modules if isinstance(module, DepthConv2d)]


def convert(
    model: nn.Module,
    conv: str | None = "malleable",
    kernels: int = _DEFAULT_KERNELS,
    where: Where = "first-of-stage",
    *,
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
        where: ``"first-of-stage"`` (the first k × k, k > 1, convolution of the first residual unit of every stage, as
            in the paper), ``"all"`` (every k × k, k > 1), names or globs of modules (``["layer4.*.conv2"]``), or
            ``f(name, conv2d) -> bool``.
        example: image batch (N, C, H, W) to find stages and rates with, if a blank one of 128 × 128 does not suit the
            network.
        options: for the layers, for example ``temperature=2.0`` or ``invalid="ignore"``.

    Example:
        >>> net = convert(timm.create_model("resnet18", pretrained=True))
        >>> logits = net(rgb, depth=depth, focal=525.0)
    """
    if isinstance(model, Converted) or any(isinstance(m, DepthConv2d) for m in model.modules()):
        raise ValueError("model already has depth-seeing convolutions; convert the original network instead")
    if conv is None:
        return Converted(copy.deepcopy(model))
    seen, failure = None, None
    try:
        seen = watch(model, example)
    except Exception as error:  # foreign code may fail in any way; it matters only if the stages are asked for
        failure = error
    names = _select(model, where, seen, failure)
    placed = [Placed(name, None, seen.rate(name) if seen else None) for name in names]
    return place(copy.deepcopy(model), placed, conv, kernels, options)


def place(model: nn.Module, placed: Sequence[Placed], conv: str, kernels: int, options: dict[str, Any]) -> Converted:
    """Put a layer in each of the places ``placed`` of ``model`` itself."""
    if conv not in CONVOLUTIONS:
        raise ValueError(f"conv must be None or one of {', '.join(map(repr, CONVOLUTIONS))}, got {conv!r}")
    if conv != "depth_aware":
        options = {"kernels": kernels, **options}
    elif kernels not in (1, _DEFAULT_KERNELS):
        raise ValueError(f"kernels must be 1 for conv='depth_aware', which has a single kernel, got {kernels}")
    for layer in placed:
        model = _replace(model, layer.name, CONVOLUTIONS[conv], options)
    return Converted(model, placed)


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
        names = seen.first_of_stages(model)
    elif where == "all":
        names = list(candidates)
    elif callable(where):
        names = [name for name, module in candidates.items() if where(name, module)]
    else:
        patterns = [where] if isinstance(where, str) else list(where) if isinstance(where, Iterable) else [where]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"where must be 'first-of-stage', 'all', names, globs or a function, got {where!r}")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in candidates):
                raise ValueError(f"where: {pattern!r} matches no k × k convolution, k > 1, of {kind}")
        names = [name for name in candidates if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        raise ValueError(
            f"where={where!r} finds nothing to replace in {kind}, which has {len(candidates)} k × k, k > 1, "
            "convolutions; where may also be 'all', names, globs or a function"
        )
    return names


def _replace(model: nn.Module, name: str, layer_type: type[DepthConv2d], options: dict[str, Any]) -> nn.Module:
    """Put a depth-seeing layer in place of convolution ``name`` of ``model``, under every name it has."""
    conv2d = cast(nn.Conv2d, model.get_submodule(name))
    try:
        layer = layer_type.from_conv2d(conv2d, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"cannot convert {name}: {error}") from error
    if conv2d is model:
        return layer
    for other, module in model.named_modules():
        if module is not conv2d and any(value is conv2d.weight for value in module._parameters.values()):
            raise ValueError(f"cannot convert {name}: it shares its weight with {other}; give it one of its own first")
    for parent in list(model.modules()):
        for child, module in list(parent._modules.items()):
            if module is conv2d:
                parent._modules[child] = layer
    return model
