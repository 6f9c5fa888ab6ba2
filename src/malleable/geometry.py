"""Geometry holds a batch's depth and focal length, and gives convolutions at any rate what they need (paper, Eq. 1)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from math import inf
from numbers import Real
from typing import NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from malleable.ops.differences import fast_differences
from malleable.ops.direct import is_transformed
from malleable.ops.fill import fill
from malleable.ops.smooth import smooth
from malleable.ops.window import Pair, Window, whole_number

T = TypeVar("T")

# No sensor measures outside these bounds, and inside them neither d nor its gradient can overflow.
_NEAREST, _FARTHEST = 1e-9, 1e9


class Differences(NamedTuple):
    """Holds what each tap of a convolution sees of the depth map.

    value: (N, taps, Hout, Wout), depth(center) − depth(tap), positive for a nearer tap, 0 where not valid.
    valid: (N, taps, Hout, Wout) bool, depth is known at both the center and the tap.
    """

    value: Tensor
    valid: Tensor


class Geometry:
    """Holds depth at image resolution and the focal length that belongs to it.

    Make one per forward pass and hand it to every layer of the pass: layers at the same rate share what they need of
    it. Neither tensor may be changed in place afterwards.

    Args:
        depth: (N, 1, H, W) metres, at the resolution of the image. 0, negative, NaN and inf mark pixels without depth.
            Leave it in float32: bfloat16 has surfaces in steps of a centimetre.
        focal: pixels of that image, the mean of fx and fy; a number for all samples or a tensor (N,).

    Example:
        >>> import torch, malleable as mb
        >>> mb.Geometry(torch.full((2, 1, 240, 320), 1.5), focal=260.0)
        Geometry(depth=(2, 1, 240, 320), focal=[260.0, 260.0])
    """

    def __init__(self, depth: Tensor, focal: float | Tensor) -> None:
        if not isinstance(depth, Tensor):
            raise TypeError(f"depth must be a tensor, got {type(depth).__name__}; use torch.as_tensor")
        if depth.ndim != 4 or depth.shape[1] != 1:
            raise ValueError(f"depth must have shape (N, 1, H, W), got {tuple(depth.shape)}")
        if not depth.is_floating_point():
            raise TypeError(
                f"depth must be floating-point metres, got {depth.dtype}; malleable.to_metres converts counts"
            )
        if depth.dtype == torch.bfloat16:
            warnings.warn(
                "depth is bfloat16, which has steps of 1.6 cm at 2 m, more than neighbours differ by; leave depth in "
                "float32, whatever the network has",
                stacklevel=2,
            )
        self.depth = depth
        self.focal = _focal_per_sample(focal, depth)  # (N,)
        self._shared: dict[Hashable, object] = {}

    def __repr__(self) -> str:
        focal = tuple(self.focal.shape) if self.focal.is_meta else self.focal.tolist()
        return f"Geometry(depth={tuple(self.depth.shape)}, focal={focal})"

    def __getstate__(self) -> dict[str, object]:
        return {"depth": self.depth, "focal": self.focal, "_shared": {}}

    def to(self, device: torch.device | str) -> Geometry:
        """Return the same geometry on another device."""
        return Geometry(self.depth.to(device), self.focal.to(device))

    def filled(self) -> Geometry:
        """Return the same geometry with unknown depth interpolated from the known pixels around it.

        Images without any stay unknown.
        """
        return self.prepared(fill_depth=True)

    def smoothed(self, passes: int = 1) -> Geometry:
        """Return the same geometry with the median of every 3 × 3 pixels for their depth, so many times over.

        Unknown pixels are filled once as :meth:`filled` does, smoothed with their neighbours, and unknown again after.
        """
        return self.prepared(smooth_depth=passes)

    def prepared(self, fill_depth: bool = False, smooth_depth: int = 0) -> Geometry:
        """Return it :meth:`filled` if ``fill_depth``, then :meth:`smoothed` by so many passes; itself for neither."""
        smooth_depth = check_smooth_depth(smooth_depth)
        if not fill_depth and not smooth_depth:
            return self
        given = self.depth.to(torch.promote_types(self.depth.dtype, torch.float32))
        known = _is_known(given)
        depth = fill(given, known)
        for _ in range(smooth_depth):
            depth = smooth(depth)
        return self._with(depth if fill_depth else torch.where(known, depth, 0.0))

    def padded(self, border: Sequence[int]) -> Geometry:
        """Return the same geometry with unknown depth around it: columns left and right, rows above and below."""
        return self._with(pad(self.depth, tuple(border)))

    def depth_at(self, size: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, float | Tensor]:
        """Return depth at a feature map of ``size`` (height, width), and the rate r_down of that map.

        Feature (i, j) at rate r is centered on image pixel (r·i, r·j). Depth is (N, 1, height, width), 0 where invalid.
        """
        return self._share(("depth", *size, dtype), lambda: self._depth_at(size, dtype))

    def depth_difference(self, window: Window, size: Sequence[int], dtype: torch.dtype = torch.float32) -> Differences:
        """Compute depth(i) − depth(j) in metres, for every tap j of ``window`` on a feature map of ``size``."""
        return self._share(("metres", window, *size, dtype), lambda: self._difference(window, size, dtype, False))

    def relative_depth(self, window: Window, size: Sequence[int], dtype: torch.dtype = torch.float32) -> Differences:
        """Compute d = (depth(i) − depth(j)) / unit(i), with the unit that :func:`grid_unit` gives (Eq. 1)."""
        return self._share(("relative", window, *size, dtype), lambda: self._difference(window, size, dtype, True))

    def _with(self, depth: Tensor) -> Geometry:
        geometry = Geometry(depth, 1.0)
        geometry.focal = self.focal  # which was checked, and cannot be where only shapes are known
        return geometry

    def _depth_at(self, size: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, float | Tensor]:
        rate, rows, columns = sample_positions(self.depth.shape[-2:], size, self.depth.device)
        if isinstance(rows, slice):
            depth = self.depth[:, :, rows, columns]
        else:
            depth = self.depth.index_select(2, rows).index_select(3, cast(Tensor, columns))
        depth = depth.to(dtype)
        valid = _is_known(depth) & self._focal_known().view(-1, 1, 1, 1)
        return torch.where(valid, depth, 0.0), rate

    def _difference(self, window: Window, size: Sequence[int], dtype: torch.dtype, relative: bool) -> Differences:
        fast = self._fast_difference(window, size, relative) if dtype == torch.float32 else None
        if fast is not None:
            return fast
        depth, rate = self.depth_at(size, dtype)
        taps = torch.cat(list(window.views(depth)), dim=1)  # (N, taps, Hout, Wout)
        center = taps[:, window.center : window.center + 1]
        valid = (taps > 0) & (center > 0)
        difference = torch.where(valid, center - taps, 0.0)
        if relative:
            focal = torch.where(self._focal_known(), self.focal, 1.0).to(dtype).view(-1, 1, 1, 1)
            difference = difference / grid_unit(torch.where(center > 0, center, 1.0), focal, rate, window.dilation)
        return Differences(difference, valid)

    def _fast_difference(self, window: Window, size: Sequence[int], relative: bool) -> Differences | None:
        """The same in C++, or None where that is not possible."""
        if self.depth.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        rate = _known_rate(self.depth.shape[-2:], tuple(size))
        if rate is None:
            return None
        unit = grid_unit(1.0, 1.0, rate, window.dilation) if relative else 0.0
        bounds = (_NEAREST, _FARTHEST)
        found = fast_differences(self.depth, self.focal, window, (size[0], size[1]), rate, unit, bounds)
        return None if found is None else Differences(*found)

    def _focal_known(self) -> Tensor:
        """Tell, (N,) bool, what could not be checked before without stalling the device: whether focal is usable."""
        return (self.focal > 0) & (self.focal < torch.inf)

    def _share(self, key: Hashable, compute: Callable[[], T]) -> T:
        # A compiler finds common subexpressions itself, a graph kept here would be freed by the first backward, and
        # what torch.func wraps is of no use to anybody else.
        learns = torch.is_grad_enabled() and (self.depth.requires_grad or self.focal.requires_grad)
        if learns or torch.compiler.is_dynamo_compiling() or is_transformed():
            return compute()
        if torch.compiler.is_exporting():
            key = repr(key)  # sizes may be symbols, which have no hash
        key = (key, torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        if key not in self._shared:
            self._shared[key] = compute()
        return cast(T, self._shared[key])


@overload
def grid_unit(depth: float, focal: float, rate: float = 1, dilation: Pair = 1) -> float: ...
@overload
def grid_unit(depth: Tensor, focal: float | Tensor, rate: float | Tensor = 1, dilation: Pair = 1) -> Tensor: ...
def grid_unit(
    depth: float | Tensor, focal: float | Tensor, rate: float | Tensor = 1, dilation: Pair = 1
) -> float | Tensor:
    """Compute the metres that count as a relative difference of 1: r_down · r_dilate · depth / f (Eq. 1).

    Args:
        depth: metres, at the center of the kernel.
        focal: pixels of the image.
        rate: pixels of the image that one step on the feature map is.
        dilation: of the convolution; of a pair the mean counts, as of the two focal lengths of a camera.
    """
    spread = sum(dilation) / 2 if isinstance(dilation, Sequence) else dilation
    return rate * spread * depth / focal


def check_smooth_depth(passes: int) -> int:
    """Return a number of passes, or refuse one that cannot be done."""
    return whole_number("smooth_depth", passes, 0)


def _is_known(depth: Tensor) -> Tensor:
    return (depth > _NEAREST) & (depth < _FARTHEST)


def _focal_per_sample(focal: float | Tensor, depth: Tensor) -> Tensor:
    batch = depth.shape[0]
    if not isinstance(focal, Tensor):
        if not isinstance(focal, (int, float)) and not isinstance(focal, Real):  # compilers know the first two
            raise TypeError(f"focal must be a number or a tensor, got {type(focal).__name__}")
        if not 0 < focal < inf:
            raise ValueError(f"focal must be a positive number of pixels, got {focal}")
        dtype = torch.promote_types(depth.dtype, torch.float32)
        return torch.full((batch,), float(focal), dtype=dtype, device=depth.device)
    if focal.ndim > 1 or (focal.ndim == 1 and focal.shape[0] != batch):
        raise ValueError(f"focal must be a number or have shape ({batch},) like the batch, got {tuple(focal.shape)}")
    if focal.device != depth.device:
        raise ValueError(f"focal is on {focal.device} but depth on {depth.device}; move both to one device")
    unseen = torch.compiler.is_compiling() or is_transformed()
    if focal.device.type == "cpu" and not unseen and not bool(((focal > 0) & (focal < torch.inf)).all()):
        raise ValueError(f"focal must be a positive number of pixels for every sample, got {focal.tolist()}")
    return focal.to(torch.promote_types(depth.dtype, torch.float32)).expand(batch)


_POWERS_OF_TWO: list[int] = [2**n for n in range(11)]
_COARSE = _POWERS_OF_TWO[4:]


def sample_positions(
    image: Sequence[int], size: Sequence[int], device: torch.device
) -> tuple[float | Tensor, slice | Tensor, slice | Tensor]:
    """Find the rate of a map of ``size`` in an ``image`` (both height, width), and the rows and columns it samples.

    At an integer rate r feature (i, j) sits on pixel (r·i, r·j); otherwise each feature takes the nearest pixel above
    and left of it.
    """
    if torch.compiler.is_compiling():
        return _sample_positions_as_tensors(image, size, device)
    rate = integer_rate(image, size)
    if rate is not None:
        # A map that was rounded down leaves pixels over.
        return rate, slice(None, size[0] * rate, rate), slice(None, size[1] * rate, rate)
    _check_sizes(image, size)
    rows, columns = (torch.arange(s, device=device) * n // s for n, s in zip(image, size, strict=True))
    return (image[0] / size[0] + image[1] / size[1]) / 2, rows, columns


def integer_rate(image: Sequence[int], size: Sequence[int]) -> int | None:
    """Find the rate r of a map, if it is an integer.

    Networks halve their maps, some rounding up and some down: a power of two from 16 on that gives the map so goes
    first. Finer maps are hardly ever in doubt. Otherwise ceil(image / r) = size in both directions; small maps may fit
    several integers, of which an exact ratio goes first, then a power of two, then the smallest.
    """
    if min(size) < 1 or min(image) < 1:
        raise ValueError(
            f"maps must have at least one pixel, got an image of {tuple(image)} and a map of {tuple(size)}"
        )
    low = max(-(-n // s) for n, s in zip(image, size, strict=True))
    coarse = (p for p in _COARSE if all(s in (n // p, -(-n // p)) for n, s in zip(image, size, strict=True)))
    if halved := next(coarse, None):
        return halved
    # A side of one pixel fits every rate that is large enough. Where all are so, a power of two must be near.
    high = min((-(-n // (s - 1)) - 1 for n, s in zip(image, size, strict=True) if s > 1), default=2 * min(image))
    if low > high:
        return None
    if all(n == low * s for n, s in zip(image, size, strict=True)):
        return low
    return next((p for p in _POWERS_OF_TWO if low <= p <= high), low)


_known_rate = functools.lru_cache(maxsize=1024)(integer_rate)


def _sample_positions_as_tensors(
    image: Sequence[int], size: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the same, free of branches: in a compiled graph sizes may be symbols, known only when it runs."""
    # Floating-point numbers, exact for these sizes: ONNX needs nine operators for one quotient of integers.
    n, s = (torch.stack([torch.full((), i, dtype=torch.float64, device=device) for i in at]) for at in (image, size))
    low = (n / s).ceil().amax(0)
    high = torch.where(s > 1, (n / (s - 1)).ceil() - 1, inf).amin(0)
    high = torch.where(high < inf, high, 2 * n.amin(0))
    powers = torch.tensor(_POWERS_OF_TWO, dtype=torch.float64, device=device)
    best = torch.where((powers >= low) & (powers <= high), powers, inf).amin(0)
    exact = (low * s - n).amax(0) == 0
    ratio = n[:, None] / powers  # (2, powers)
    halves = ((ratio.floor() == s[:, None]) | (ratio.ceil() == s[:, None])).all(0) & (powers >= _COARSE[0])
    halved = torch.where(halves, powers, inf).amin(0)
    rate = torch.where(halved < inf, halved, torch.where(exact | (best > high), low, best))
    whole = (halved < inf) | (low <= high)
    n, s = torch.where(whole, rate, n), torch.where(whole, 1.0, s)
    rows, columns = (
        (torch.arange(length, dtype=torch.float64, device=device) * n[axis] / s[axis]).floor().long()
        for axis, length in enumerate(size)
    )
    return (n / s).mean().to(torch.float32), rows, columns


def _check_sizes(image: Sequence[int], size: Sequence[int]) -> None:
    """Refuse sizes of different shapes, allowing a border pixel and a tenth for networks that do not pad."""
    low = max(n / (s + 1) for n, s in zip(image, size, strict=True))
    high = min(n / (s - 1) if s > 1 else inf for n, s in zip(image, size, strict=True))
    if size[0] > image[0] or size[1] > image[1] or low > 1.1 * high:
        raise ValueError(
            f"a feature map of {size[0]}×{size[1]} cannot come from an image of {image[0]}×{image[1]}: depth must have "
            "the resolution of the image that the network is given"
        )
