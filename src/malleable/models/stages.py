"""Watch a network at work: which convolution runs at which rate, and which modules are residual units."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from malleable.geometry import integer_rate

_SIZE = (128, 128)  # a map at rate 32 still has 4 × 4 pixels, and a pass takes a fraction of a second


@dataclass
class Watched:
    """Tells what a network did in one pass. Names are those of ``named_modules``; dicts are in order of execution."""

    image: tuple[int, int]
    convolutions: dict[str, tuple[int, int]] = field(default_factory=dict)  # k × k, k > 1 → (height, width) of input
    outputs: dict[str, torch.Size] = field(default_factory=dict)  # modules that map one tensor to one → output shape
    adders: list[str] = field(default_factory=list)  # modules that add two equal maps themselves

    def rate(self, name: str) -> float | None:
        """Tell the down-sampling rate of the map that convolution ``name`` reads; None if it did not run."""
        size = self.convolutions.get(name)
        return None if size is None else integer_rate(self.image, size) or self.image[0] / size[0]

    def first_of_stages(self, model: nn.Module) -> list[str]:
        """Find the first k × k convolution of the first residual unit of every stage, in the order of execution.

        A residual unit adds its input to what it made of it. Units without that sum (MobileNet has none where a stage
        begins) are known by their place: the same path, numbers aside. A stage begins where the shape of the units'
        output changes, be it in size or in channels: a dilated stage keeps the size.
        """
        seed = next((name for name in self.adders if name in self.outputs and self._first_in(name)), None)
        if seed is None:
            return []
        first: list[str] = []
        shape = None
        for name, output in self.outputs.items():
            if _place(name) != _place(seed) or isinstance(model.get_submodule(name), nn.Sequential):
                continue
            convolution = self._first_in(name)
            if convolution and output != shape:
                first.append(convolution)
                shape = output
        return first

    def _first_in(self, unit: str) -> str | None:
        return next((name for name in self.convolutions if name.startswith(f"{unit}.")), None)


@torch.no_grad()
def watch(model: nn.Module, example: Tensor | None = None) -> Watched:
    """Run a twin of ``model`` in eval mode on ``example``, by default a blank image of 128 × 128."""
    if example is None:
        channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
        like = next(model.parameters(), torch.empty(0))
        example = torch.zeros(1, channels, *_SIZE, device=like.device, dtype=like.dtype)
    weights = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, weights).eval()  # weights are shared; whatever the pass writes stays with the twin
    watcher = _Watcher(Watched(image=(example.shape[-2], example.shape[-1])))
    for name, module in twin.named_modules():
        watcher.follow(name, module)
    with watcher:
        twin(example)
    return watcher.seen


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Watched) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen
        self.running: list[str] = []

    def follow(self, name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.running.append(name)
            if sees_neighbours(module):
                self.seen.convolutions.setdefault(name, (args[0].shape[-2], args[0].shape[-1]))

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.running.pop()
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if len(tensors) == 1 and isinstance(output, Tensor):
                self.seen.outputs.setdefault(name, output.shape)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and self.running:
            maps = [value for value in args[:2] if isinstance(value, Tensor) and value.ndim == 4]
            if len(maps) == 2 and maps[0].shape == maps[1].shape:
                self.seen.adders.append(self.running[-1])
        return func(*args, **(kwargs or {}))


def sees_neighbours(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Tell whether ``module`` is a 2-D convolution with a kernel larger than 1 × 1."""
    return isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1


def _place(name: str) -> str:
    return re.sub(r"\d+", "*", name)
