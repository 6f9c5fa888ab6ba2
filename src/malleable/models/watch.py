"""One pass of a network on a blank image, and what it does there."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from operator import add
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from malleable.models.stages import OCTAVE, SMALLEST, Map, Ran, Watched
from malleable.ops.window import pair

_SIZES = (128, 224, 256)  # a map at rate 32 still has 4 × 4 pixels of 128, and a pass takes a fraction of a second


def watch(model: nn.Module, example: Tensor | None = None) -> Watched:
    """Run a twin of ``model`` in eval mode on ``example``, by default on the first blank image that it takes."""
    if example is not None:
        return _watch(model, example)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    first: Watched | Exception | None = None
    for shape in dict.fromkeys(_shapes(model)):
        try:
            seen = _watch(model, torch.zeros(2, *shape, device=like.device, dtype=like.dtype))
        except Exception as error:  # foreign code may fail in any way
            first = first or error
            continue
        if seen.coarsest() >= SMALLEST:
            return seen
        first = seen if not isinstance(first, Watched) else first
    if isinstance(first, Watched):
        return first
    assert first is not None
    raise first


@torch.no_grad()
def _watch(model: nn.Module, example: Tensor) -> Watched:
    weights = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, weights).eval()  # weights are shared; whatever the pass writes stays with the twin
    watcher = _Watcher(example)
    for name, module in twin.named_modules():
        watcher.follow(name, module)
    with watcher:
        twin(example)
    return watcher.seen


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, example: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.example = example
        self.seen = Watched(image=(example.shape[-2], example.shape[-1]))
        self.running: list[str] = []
        self.given: list[tuple[list[Map], bool]] = []  # to the modules that run, and whether a map had been enlarged
        self.smallest = example.shape[-2]  # height that any convolution wrote, pooled vectors aside
        self.grown = False
        self.padded: Tensor | None = None  # the last map that was padded, but not by a convolution itself
        self.convolving = 0
        self.pads, self.mode = (0, 0, 0, 0), "zeros"

    def follow(self, name: str, module: nn.Module) -> None:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.running.append(name)
            self.convolving += isinstance(module, nn.Conv2d)
            maps = [given for value in (*args, *kwargs.values()) if (given := _map(value))]
            self.given.append((maps, self.grown))
            if maps:
                self.seen.inputs.setdefault(name, maps[0].width)

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.running.pop()
            self.convolving -= isinstance(module, nn.Conv2d)
            maps, grown = self.given.pop()
            result = _map(output[0] if isinstance(output, tuple) and output else output)
            if result:
                self.seen.outputs.setdefault(name, result)
            if maps and result and maps[0].height == result.height < self.example.shape[-2]:
                self.grown = grown  # an enlargement inside of a block that keeps the size is none of the network
            if isinstance(module, nn.Conv2d):
                self._note(name, module, next(iter((*args, *kwargs.values()))), output)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True)

    def _note(self, name: str, conv: nn.Conv2d, x: Tensor, y: Tensor) -> None:
        if y.shape[-2] > 1:
            self.smallest = min(self.smallest, y.shape[-2])
        if not sees_neighbours(conv) or name in self.seen.convolutions:
            return
        stride = pair("stride", conv.stride, minimum=1)  # torch also runs a number that was put there
        overlaps = any(k > s for k, s in zip(conv.kernel_size, stride, strict=True))
        image = self.example.shape
        stem = x.shape[1] == image[1] and x.shape[-1] * OCTAVE > image[-1]
        counts = overlaps and not stem and self._has_the_shape_of_the_image(x) and min(y.shape[-2:]) > 1
        left, right, top, bottom = pads = self.pads if self.padded is x else (0, 0, 0, 0)
        reads = (x.shape[-2] - top - bottom, x.shape[-1] - left - right)
        if min(pads) < 0:  # it cuts off
            pads = (0, 0, 0, 0)
        self.seen.convolutions[name] = Ran(
            name, reads, (y.shape[-2], y.shape[-1]), pads, self.mode, counts, self.grown, not self.seen.sums
        )

    def _has_the_shape_of_the_image(self, x: Tensor) -> bool:
        (n, _, height, width), (h, w) = self.example.shape, x.shape[-2:]
        return x.ndim == 4 and len(x) == n and min(h, w) > 1 and 0.7 < (height / h) / (width / w) < 1.4

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and self.running:
            maps = [value for value in args[:2] if isinstance(value, Tensor)]
            summed = _map(result) if len(maps) == 2 and maps[0].shape == maps[1].shape else None
            if summed and len(result) == len(self.example):
                if len(self.given[-1][0]) == 1:  # a sum of two inputs is no residual
                    self.seen.adders.add(self.running[-1])
                if not self.grown:
                    self.seen.sums.add(summed.height)
        elif func in _PADDING and not self.convolving and len(args[1]) in (2, 4):
            mode = "zeros" if _PADDING[func] == "constant" and not any(args[2:]) else _PADDING[func]
            before, other = ((0, 0, 0, 0), mode) if args[0] is not self.padded else (self.pads, self.mode)
            # Some networks pad columns first, then rows.
            left, right, top, bottom = map(add, before, (*args[1], 0, 0))
            self.padded, self.pads = result, (left, right, top, bottom)
            self.mode = mode if other == "zeros" else other
        elif _enlarges(func, args) and result.shape[-2] > self.smallest * OCTAVE:
            self.grown |= args[0].shape[-2] < self.example.shape[-2]  # but not where the image itself is resized
        return result


def sees_neighbours(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Tell whether ``module`` is a 2-D convolution with a kernel larger than 1 × 1."""
    return isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1


def _shapes(model: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Go through the shapes of images that ``model`` may take: channels, height, width."""
    guessed = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
    for channels in dict.fromkeys((guessed, 3)):
        yield channels, _SIZES[0], _SIZES[0]
        yield from _own_shapes(model)
        for size in _SIZES[1:]:
            yield channels, size, size


def _own_shapes(model: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Go through the shapes that ``model`` names itself, as timm and transformers write them."""
    for key in ("pretrained_cfg", "default_cfg"):
        settings = getattr(model, key, None)
        if isinstance(settings, dict) and len(settings.get("input_size") or ()) == 3:
            yield tuple(settings["input_size"])
    config = getattr(model, "config", None)
    size = getattr(config, "image_size", None) or getattr(getattr(config, "backbone_config", None), "image_size", None)
    if size:
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        yield getattr(config, "num_channels", 3), height, width


_PADDING = {
    torch.ops.aten.constant_pad_nd.default: "constant",
    torch.ops.aten.reflection_pad2d.default: "reflect",
    torch.ops.aten.replication_pad2d.default: "replicate",
}
_GROWING = re.compile(r"upsample|pixel_shuffle|grid_sampler|unpool")


def _enlarges(func: Any, args: Any) -> bool:
    if func is torch.ops.aten.convolution.default:
        return bool(args[6]) and max(args[3]) > 1  # transposed, with a stride
    return _GROWING.search(func.__name__) is not None


def _map(value: Any) -> Map | None:
    """Tell what map a tensor is; None for what is none."""
    shape = value.shape if isinstance(value, Tensor) else ()
    if len(shape) == 4 and shape[2] == shape[3]:
        return Map(shape[2], shape[1]) if shape[2] > 1 else None
    if len(shape) == 4 and shape[1] == shape[2]:
        return Map(shape[1], shape[3]) if shape[1] > 1 else None
    if len(shape) == 3 and shape[1] > 3:
        side = math.isqrt(shape[1])
        return Map(side, shape[2]) if shape[1] - side**2 <= 1 else None  # a class token may go with them
    return None
