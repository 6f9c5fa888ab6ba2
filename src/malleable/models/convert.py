"""Put the layers into a network that already exists.

How depth reaches a layer deep inside foreign code. The layer is called as ``conv(x)``, so the geometry must come from
beside the arguments. Rewriting the graph (FX) fails on code it cannot trace; tagging tensors fails at the first
operator, which drops the tag; a global or context variable is shared by networks that have nothing to do with each
other. So every converted network owns one slot. The wrapper's forward puts the pass's geometry there and takes it out
again in a ``finally``; each placed layer has a forward pre-hook that hands it on. Only Python sees the slot:
``torch.compile`` and ``torch.export`` trace through it and keep the plain data flow, autocast and DDP never meet it. It
holds one value per thread, so replicas and servers that run one network from several threads do not mix; it copies and
pickles as an empty slot of its own, shared by the layers of the copy. Activation checkpointing runs layers again during
backward, after the forward pass has ended: gradient hooks on the outputs name, when the backward of a pass begins, the
geometry of that very pass. The engine runs the nodes of a later pass before those of an earlier one, so even one
backward over two passes finds the right geometry for each. A layer that finds none says so; it never takes another
pass's.
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
    """Where the placed layers of one network find the geometry of the pass they run in."""

    def __init__(self) -> None:  # runs once in every thread that looks here
        self.geometry: Geometry | None = None  # of the forward pass that is running
        self.replayed: weakref.ref[Geometry] | None = None  # of the backward that is running; its graph owns it

    def __reduce__(self) -> tuple[type[Slot], tuple[()]]:
        return Slot, ()

    def supply(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook of a placed layer: add the geometry, unless the caller gave one."""
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
    """A layer that conversion put into a network; :meth:`Converted.layers` has the layer itself."""

    name: str  # as in the network that was converted
    stage: str | None  # "res2" … "res5"; None if not known
    rate: float | None  # of the map it reads; None if not known


class Converted(nn.Module):
    """A network that is called as ``model`` is, plus ``depth=`` and ``focal=``, and answers as it does.

    Made by :func:`convert`. Parameters are those of ``model``, under ``model.`` in the state dict.
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
        _check_image((*args, *kwargs.values()), depth)
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
        for name, layer in self._named_layers():
            for key in layer.state_dict().keys() - {"weight", "bias"}:
                del state[_key(name, key)]
            state[_key(name, "weight")] = layer.weight.detach()[: layer.out_channels]
        return state

    def load_original(self, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of the network before conversion: weights go into every kernel (paper, 3.3)."""
        original = self.original_state()
        added = {key: value for key, value in self.model.state_dict().items() if key not in original}
        weights = {_key(name, "weight"): layer.kernels for name, layer in self._named_layers()}
        repeated = {key: torch.cat([state[key]] * kernels) for key, kernels in weights.items() if key in state}
        self.model.load_state_dict({**added, **state, **repeated})

    def _named_layers(self) -> list[tuple[str, DepthConv2d]]:
        """List the placed layers under every name that they have."""
        modules = self.model.named_modules(remove_duplicate=False)
        return [(name, module) for name, module in modules if isinstance(module, DepthConv2d)]


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
    seen, failure = _try_to_watch(model, example)
    names = _select(model, where, seen, failure)
    placed = [Placed(name, None, seen.rate(name) if seen else None) for name in names]
    return place(copy.deepcopy(model), placed, conv, kernels, options)


def place(model: nn.Module, placed: Sequence[Placed], conv: str, kernels: int, options: dict[str, Any]) -> Converted:
    """Put a layer in each of the places ``placed`` of ``model`` itself."""
    layer_type, options = _layer(conv, kernels, options)
    for layer in placed:
        model = _replace(model, layer.name, layer_type, options)
    return Converted(model, placed)


def _layer(conv: str, kernels: int, options: dict[str, Any]) -> tuple[type[DepthConv2d], dict[str, Any]]:
    if conv not in CONVOLUTIONS:
        raise ValueError(f"conv must be None or one of {', '.join(map(repr, CONVOLUTIONS))}, got {conv!r}")
    if conv != "depth_aware":
        return CONVOLUTIONS[conv], {"kernels": kernels, **options}
    if kernels not in (1, _DEFAULT_KERNELS):
        raise ValueError(f"kernels must be 1 for conv='depth_aware', which has a single kernel, got {kernels}")
    return DepthAwareConv2d, options


def _try_to_watch(model: nn.Module, example: Tensor | None) -> tuple[Watched | None, Exception | None]:
    try:
        return watch(model, example), None
    except Exception as error:  # foreign code may fail in any way; it matters only if the stages are asked for
        return None, error


def _select(model: nn.Module, where: Where, seen: Watched | None, failure: Exception | None) -> list[str]:
    """Find the names of the convolutions to replace."""
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and sees_neighbours(module)
    }
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
                raise ValueError(f"where: {pattern!r} matches no k × k convolution, k > 1, of {_kind(model)}")
        names = [name for name in candidates if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        raise ValueError(
            f"where={where!r} finds nothing to replace in {_kind(model)}, which has {len(candidates)} k × k, k > 1, "
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


def _check_image(inputs: tuple[Any, ...], depth: Tensor) -> None:
    """Refuse depth at another resolution than the image, the first input that can be one: rates would be wrong."""
    image = next((value for value in inputs if isinstance(value, Tensor) and value.ndim == 4), None)
    if image is not None and image.shape[-2:] != depth.shape[-2:]:
        raise ValueError(
            f"depth must have the resolution of the image, {tuple(image.shape[-2:])}, got {tuple(depth.shape[-2:])}"
        )


def _key(module: str, name: str) -> str:
    """Join the name of a module and that of its tensor; the network itself has no name."""
    return f"{module}.{name}" if module else name


def _kind(model: nn.Module) -> str:
    return type(model).__name__
