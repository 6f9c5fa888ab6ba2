"""Class probabilities of one image: whole or in windows, at one scale or several, mirrored or not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torchvision.transforms import v2

from malleable.data.sample import Batch, Sample, collate
from malleable.data.transforms import eval_transform
from malleable.runs.scores import Protocol


@torch.no_grad()
def probabilities(net: nn.Module, sample: Sample, protocol: Protocol | None = None) -> Tensor:
    """Average the softmax of ``net``'s logits over scales and flips: (C, H, W) float32 at the size of ``sample``.

    ``net`` is called as ``net(image, depth=..., focal=...)`` on the device of its parameters, in the mode it is in.
    """
    protocol = protocol or Protocol()
    device = next((parameter.device for parameter in net.parameters()), torch.device("cpu"))
    size = sample.camera.size
    total: Tensor | None = None
    views = list(product(protocol.scales, (False, True) if protocol.flip else (False,)))
    for scale, mirrored in views:
        batch = _view(sample, scale, mirrored)
        batch = Batch._make([*(part.to(device) for part in batch[:4]), batch.ids])
        logits = _logits(net, batch, protocol)
        if mirrored:
            logits = logits.flip(-1)
        if logits.shape[-2:] != size:
            logits = interpolate(logits, size, mode="bilinear")
        part = logits.softmax(dim=1)[0]
        total = part if total is None else total + part
    assert total is not None
    return total / len(views)


def _view(sample: Sample, scale: float, mirrored: bool) -> Batch:
    """Rescale the sample as in training, camera and all: the image is mixed, depth taken from the nearest pixel."""
    size = [max(1, round(length * scale)) for length in sample.camera.size]
    if tuple(size) != sample.camera.size:
        sample = v2.Resize(size)(sample)
    if mirrored:
        sample = v2.RandomHorizontalFlip(1.0)(sample)
    return collate([eval_transform()(sample)])


def _logits(net: nn.Module, batch: Batch, protocol: Protocol) -> Tensor:
    """Give logits (1, C, H, W) in float32 at the batch's size; where windows overlap, the mean of theirs."""
    height, width = batch.image.shape[-2:]
    if protocol.window is None:
        return _run(net, batch, slice(0, height), slice(0, width))
    rows, columns = (
        list(_windows(length, window, protocol.overlap))
        for length, window in zip((height, width), protocol.window, strict=True)
    )
    total: Tensor | None = None
    seen = batch.image.new_zeros(height, width)
    for row, column in product(rows, columns):
        part = _run(net, batch, row, column)
        total = part.new_zeros(1, part.shape[1], height, width) if total is None else total
        total[..., row, column] += part
        seen[row, column] += 1
    assert total is not None
    return total / seen


def _windows(length: int, window: int, overlap: float) -> Iterator[slice]:
    """Space windows evenly from border to border; there is one, as long as the image, if that is shorter."""
    room = length - window
    if room <= 0:
        yield slice(0, length)
        return
    steps = math.ceil(room / max(1, window - math.ceil(window * overlap)))
    for step in range(steps + 1):
        start = step * room // steps
        yield slice(start, start + window)


def _run(net: nn.Module, batch: Batch, rows: slice, columns: slice) -> Tensor:
    """Run the network on a window. Cropping moves the principal point only, so the focal length stays."""
    image, depth = batch.image[..., rows, columns], batch.depth[..., rows, columns]
    logits: Tensor = net(image.contiguous(), depth=depth.contiguous(), focal=batch.focal).float()
    if logits.shape[-2:] != image.shape[-2:]:
        logits = interpolate(logits, image.shape[-2:], mode="bilinear")
    return logits
