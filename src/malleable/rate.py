"""The down-sampling rate of a feature map, read from its size and the image's, and the pixels it is centred on."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

_POWERS_OF_TWO = [2**n for n in range(11)]


def sample_positions(
    image: Sequence[int], size: Sequence[int], device: torch.device
) -> tuple[float | Tensor, slice | Tensor, slice | Tensor]:
    """The rate of a feature map of ``size`` in an ``image`` (both height, width), and the rows and columns it samples.

    At an integer rate r, that is ceil(image / r) = size, feature (i, j) sits on pixel (r·i, r·j); otherwise each
    feature takes the nearest pixel above and left of it. Small maps may fit several integers: an exact ratio goes
    first, then a power of two, as networks halve their maps, then the smallest.
    """
    if torch.compiler.is_compiling():
        return _sample_positions_as_tensors(image, size, device)
    rate = integer_rate(image, size)
    if rate is not None:
        step = slice(None, None, rate)
        return rate, step, step
    _check_sizes(image, size)
    rows, columns = (torch.arange(s, device=device) * n // s for n, s in zip(image, size, strict=True))
    return _mean_ratio(image, size), rows, columns


def integer_rate(image: Sequence[int], size: Sequence[int]) -> int | None:
    """The integer r with ceil(image / r) = size in both directions, or None."""
    if min(size) < 1 or min(image) < 1:
        raise ValueError(
            f"maps must have at least one pixel, got an image of {tuple(image)} and a map of {tuple(size)}"
        )
    low = max(-(-n // s) for n, s in zip(image, size, strict=True))
    high = min(-(-n // (s - 1)) - 1 if s > 1 else 2 * n for n, s in zip(image, size, strict=True))
    if low > high:
        return None
    if all(n == low * s for n, s in zip(image, size, strict=True)):
        return low
    return next((p for p in _POWERS_OF_TWO if low <= p <= high), low)


def _sample_positions_as_tensors(
    image: Sequence[int], size: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, free of branches: in a compiled graph sizes may be symbols, known only when it runs."""
    n = torch.stack([torch.full((), s, dtype=torch.int64, device=device) for s in image])
    s = torch.stack([torch.full((), s, dtype=torch.int64, device=device) for s in size])
    low = ((n + s - 1) // s).amax(0)
    high = torch.where(s > 1, (n + s - 2) // (s - 1).clamp(min=1) - 1, 2 * n).amin(0)
    powers = torch.tensor(_POWERS_OF_TWO, dtype=torch.int64, device=device)
    best = torch.where((powers >= low) & (powers <= high), powers, 2 * _POWERS_OF_TWO[-1]).amin(0)
    rate = torch.where((best <= high) & (n != low * s).any(), best, low)
    rows, columns = (
        torch.where(low <= high, i * rate, i * n[axis] // s[axis])
        for axis, i in enumerate(torch.arange(length, device=device) for length in size)
    )
    return torch.where(low <= high, rate.to(torch.float32), (n / s).mean()), rows, columns


def _mean_ratio(image: Sequence[int], size: Sequence[int]) -> float:
    return (image[0] / size[0] + image[1] / size[1]) / 2


def _check_sizes(image: Sequence[int], size: Sequence[int]) -> None:
    """Refuse sizes of different shapes, allowing a border pixel and a tenth for networks that do not pad."""
    low = max(n / (s + 1) for n, s in zip(image, size, strict=True))
    high = min(n / (s - 1) if s > 1 else inf for n, s in zip(image, size, strict=True))
    if size[0] > image[0] or size[1] > image[1] or low > 1.1 * high:
        raise ValueError(
            f"a feature map of {size[0]}×{size[1]} cannot come from an image of {image[0]}×{image[1]}: depth must have "
            "the resolution of the image that the network is given"
        )
