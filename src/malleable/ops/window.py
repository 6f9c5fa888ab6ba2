"""A window is a sampling grid: kernel size, stride, padding, dilation; it says what they make of a map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, NamedTuple, SupportsIndex

import torch.nn.functional as F
from torch import Tensor

Pair = int | Sequence[int]


class Window(NamedTuple):
    """Tells where a convolution looks. Taps are numbered row by row; the center is tap (kh // 2, kw // 2)."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  # left, right, top, bottom, as F.pad takes it
    dilation: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, kernel_size: Pair, stride: Pair = 1, padding: Pair | str = 0, dilation: Pair = 1) -> Window:
        """Build a window from what ``nn.Conv2d`` accepts: numbers, pairs, and ``"same"`` or ``"valid"`` padding."""
        kernel = pair("kernel_size", kernel_size, minimum=1)
        step = pair("stride", stride, minimum=1)
        spread = pair("dilation", dilation, minimum=1)
        if padding == "valid":
            padding = 0
        if padding == "same":
            if step != (1, 1):
                raise ValueError(f"padding='same' needs stride 1, got stride {step}; give the padding as numbers")
            return cls(kernel, step, same_padding((1, 1), kernel, step, spread), spread)
        if isinstance(padding, str):
            raise ValueError(f"padding must be a number, a pair, 'same' or 'valid', got {padding!r}")
        top, left = pair("padding", padding, minimum=0)
        return cls(kernel, step, (left, left, top, top), spread)

    def padded(self, padding: tuple[int, int, int, int]) -> Window:
        """Return the same window with another padding; PyTorch 2.7 does not compile ``_replace``."""
        return Window(self.kernel_size, self.stride, padding, self.dilation)

    @property
    def taps(self) -> int:
        return self.kernel_size[0] * self.kernel_size[1]

    @property
    def center(self) -> int:
        """Tell the index of the tap that relative depth is measured from."""
        kh, kw = self.kernel_size
        return kh // 2 * kw + kw // 2

    def output_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Compute the size of the output map for an input map of ``size`` (height, width)."""
        left, right, top, bottom = self.padding
        (kh, kw), (sy, sx), (dy, dx) = self.kernel_size, self.stride, self.dilation
        height = (size[0] + top + bottom - dy * (kh - 1) - 1) // sy + 1
        return height, (size[1] + left + right - dx * (kw - 1) - 1) // sx + 1

    def views(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what each tap reads of the zero-padded ``x`` (N, C, H, W), in tap order: views (N, C, Hout, Wout)."""
        padded = F.pad(x, self.padding)
        height, width = padded.shape[-2:]
        (kh, kw), (sy, sx), (dy, dx) = self.kernel_size, self.stride, self.dilation
        # Ends are counted from the far border: a graph of symbolic sizes then sees that all taps have the same.
        for i in range(kh):
            rows = padded[..., i * dy : height - (kh - 1 - i) * dy : sy, :]
            for j in range(kw):
                yield rows[..., j * dx : width - (kw - 1 - j) * dx : sx]

    def views_of_padded(self, padded: Tensor, output_size: tuple[int, int]) -> Iterator[Tensor]:
        """Yield the views themselves, for a caller that has padded already or writes through them."""
        for i in range(self.kernel_size[0]):
            rows = _every(padded, 2, i * self.dilation[0], self.stride[0], output_size[0])
            for j in range(self.kernel_size[1]):
                yield _every(rows, 3, j * self.dilation[1], self.stride[1], output_size[1])


def _every(x: Tensor, dim: int, start: int, step: int, length: int) -> Tensor:
    """Take ``length`` entries of dimension ``dim`` from ``start`` on, ``step`` apart."""
    entries = slice(start, start + step * length, step)
    return x[..., entries, :] if dim == 2 else x[..., entries]


def same_padding(
    size: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int, int, int]:
    """Give left, right, top and bottom padding after which a map of ``size`` gives one of ceil(size / stride)."""
    height, width = (
        max(((n + s - 1) // s - 1) * s + d * (k - 1) + 1 - n, 0)  # ONNX rounds −n // s the other way
        for n, k, s, d in zip(size, kernel_size, stride, dilation, strict=True)
    )
    return width // 2, width - width // 2, height // 2, height - height // 2


def pair(name: str, value: Pair, minimum: int) -> tuple[int, int]:
    """Return ``value`` as (vertical, horizontal), or raise an error that names the argument."""
    values = tuple(value) if isinstance(value, Sequence) else (value, value)
    numbers = tuple(number for number in map(_whole, values) if number is not None and number >= minimum)
    if len(values) != 2 or len(numbers) != 2:
        raise ValueError(f"{name} must be an integer ≥ {minimum} or a pair of them, got {value!r}")
    return numbers


def whole_number(name: str, value: SupportsIndex, minimum: int) -> int:
    """Return ``value`` as Python's int, or raise an error that names the argument."""
    number = _whole(value)
    if number is None:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return number


def _whole(value: Any) -> int | None:
    if isinstance(value, bool | Tensor):
        return None
    try:
        return index(value)  # of NumPy's whole numbers too
    except TypeError:
        return None
