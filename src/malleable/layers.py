"""The layers have a constructor, an assigning function, and one call to the operator each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Self

from malleable.assign import Invalid, depth_aware_assign, handle_invalid, hard_assign, malleable_assign
from malleable.geometry import Geometry
from malleable.ops.depth_conv2d import check_features, convolve
from malleable.ops.direct import is_direct, is_exporting
from malleable.ops.malleable_conv2d import malleable_conv2d
from malleable.ops.scaled_assign import scaled_assign, temperature_of
from malleable.ops.window import Pair, Window, same_padding, whole_number

LEARNABLE = ("centers", "temperature", "rebalance")

# Below this temperature the parameter is bent (see MalleableConv2d.temperature).
_BEND = 0.5
_COLDEST = 1e-12  # d² / t must stay finite


class DepthConv2d(nn.Module):
    """Does what the three convolutions share. A subclass says how taps are assigned to kernels, in :meth:`assign`."""

    # Conversion sets them in place of convolutions that are run so.
    pads_same = False  # pads as TensorFlow does, at any stride
    padded_at: int | None = None  # rate of the map that is padded with zeros before the layer reads it
    padded_before: tuple[int, int] | None = None  # columns and rows of these that come first, if not half of them
    standardise: nn.Module | None  # maps the weights to those that are convolved with

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        kernels: int = 3,
        invalid: Invalid = "same",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("in_channels", in_channels), ("out_channels", out_channels), ("groups", groups)):
            if groups < 1 or value < 1 or value % groups:
                raise ValueError(f"{name} must be positive and divisible by groups={groups}, got {value}")
        kernels = whole_number("kernels", kernels, 1)
        if invalid not in get_args(Invalid):
            raise ValueError(f"invalid must be one of {', '.join(map(repr, get_args(Invalid)))}, got {invalid!r}")
        self.window = Window.of(kernel_size, stride, padding, dilation)
        self._padding = padding if isinstance(padding, str) else self.window.padding[::-2]
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.groups = groups
        self.kernels = kernels
        self.invalid: Invalid = invalid
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        shape = (kernels * out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, **options))
        self.bias = nn.Parameter(torch.empty(out_channels, **options)) if bias else None
        self.standardise = None
        DepthConv2d.reset_parameters(self)

    @property
    def kernel_size(self) -> tuple[int, int]:
        return self.window.kernel_size

    @property
    def stride(self) -> tuple[int, int]:
        return self.window.stride

    @property
    def padding(self) -> str | tuple[int, ...]:
        """Return the padding as it was given, a word or (vertical, horizontal)."""
        return self._padding

    @property
    def dilation(self) -> tuple[int, int]:
        return self.window.dilation

    def window_on(self, size: Sequence[int]) -> Window:
        """The window on a map of ``size``, on which its padding may depend (``pads_same``)."""
        if not self.pads_same:
            return self.window
        return self.window.padded(same_padding(size, self.kernel_size, self.stride, self.dilation))

    def view(self, geometry: Geometry, size: Sequence[int]) -> tuple[Window, tuple[int, int]]:
        """The window on a map of ``size``, and the size of the part of that map that shows the geometry's image.

        What the network itself put around that part (``padded_at``) counts as padding of the window.
        """
        height, width = size
        window = self.window_on(size)
        if self.padded_at is None:
            return window, (height, width)
        rate, image = self.padded_at, geometry.depth.shape[-2:]
        rows, columns = (min(s, (n + rate - 1) // rate) for s, n in zip(size, image, strict=True))
        left, right, top, bottom = window.padding
        x, y = width - columns, height - rows
        first, above = x // 2, y // 2
        if self.padded_before is not None:
            first, above = min(x, self.padded_before[0]), min(y, self.padded_before[1])
        padding = (left + first, right + x - first, top + above, bottom + y - above)
        return window.padded(padding), (rows, columns)

    def crop(self, x: Tensor, geometry: Geometry) -> tuple[Tensor, Window]:
        """Cut out the part of x (N, C, H, W) that shows the geometry's image, for a window that pads it."""
        window, (height, width) = self.view(geometry, x.shape[-2:])
        if self.padded_at is not None:
            own = self.window_on(x.shape[-2:])
            top, left = window.padding[2] - own.padding[2], window.padding[0] - own.padding[0]
            x = x[..., top : top + height, left : left + width]
        return x, window

    def reset_parameters(self) -> None:
        """Draw weights and bias as ``nn.Conv2d`` does, every kernel on its own."""
        nn.Conv2d.reset_parameters(self)  # type: ignore[arg-type]  # it needs a weight and a bias, no more

    @classmethod
    def from_conv2d(cls, conv2d: nn.Conv2d, **options: Any) -> Self:
        """Make a layer that starts as ``conv2d``: its weights in every kernel (paper, 3.3), its bias, dtype and device.

        On flat depth, and on missing depth with ``invalid="same"``, the new layer computes what ``conv2d`` did.
        ``options`` go to the constructor.
        """
        kind = type(conv2d)
        plain = kind.forward is nn.Conv2d.forward and kind._conv_forward is nn.Conv2d._conv_forward
        if not plain or "forward" in vars(conv2d) or not {"weight", "bias"} <= conv2d._parameters.keys():
            raise TypeError(
                f"conv2d must be a plain nn.Conv2d, got {kind.__name__}, which computes its output or weights in its "
                "own way; replace or un-parametrize it first"
            )
        if any(value for name, value in vars(conv2d).items() if name.endswith("_hooks")):
            raise ValueError("conv2d has hooks, which would be lost; remove them, and register them on the new layer")
        if conv2d.padding_mode != "zeros":
            raise ValueError(f"conv2d has padding_mode={conv2d.padding_mode!r}; only 'zeros' can be honoured")
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
        same = {name: getattr(conv2d, name) for name in names}
        same |= {"bias": conv2d.bias is not None, "device": conv2d.weight.device, "dtype": conv2d.weight.dtype}
        with torch.random.fork_rng([conv2d.weight.device] if conv2d.weight.is_cuda else []):  # none of them is kept
            layer = cls(**same, **options)
        copies = torch.cat([conv2d.weight.detach()] * layer.kernels)
        layer.weight = nn.Parameter(copies, requires_grad=conv2d.weight.requires_grad)
        if conv2d.bias is not None:
            layer.bias = nn.Parameter(conv2d.bias.detach().clone(), requires_grad=conv2d.bias.requires_grad)
        return layer.train(conv2d.training)

    def assign(self, geometry: Geometry, size: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Compute what each kernel makes of each tap on a map of ``size``: (N, K, taps, Hout, Wout), scaled."""
        raise NotImplementedError

    def receptive_field(self, d: float | Tensor) -> Tensor:
        """Return g_k at depth differences ``d`` of any shape: (K, *d.shape)."""
        raise NotImplementedError

    def effective_weight(self) -> Tensor:
        """Return the weights that kernels convolve with: ``weight``, unless the network standardises its weights."""
        return self.weight if self.standardise is None else self.standardise(self.weight)

    def at_equal_depth(self) -> Tensor:
        """Compute what each kernel makes of a tap at the depth of the center: (K,), scaled."""
        return self.receptive_field(self.weight.new_zeros(()))

    def forward(self, x: Tensor, geometry: Geometry) -> Tensor:
        """Map x (N, C, H, W), at any rate of the geometry's image, to (N, O, Hout, Wout), as ``nn.Conv2d`` does."""
        weight, size = self.effective_weight(), x.shape[-2:]
        _check_inputs(x, weight, self.window_on, self.groups, geometry)
        x, window = self.crop(x, geometry)
        y = self._at_once(x, weight, geometry, window)
        if y is not None:
            return y
        assign = self.assign(geometry, size, torch.promote_types(x.dtype, torch.float32))
        short_cut = self.invalid == "same" and is_exporting() and _assigns_as_written(self)
        center = self.at_equal_depth() if short_cut else None
        return convolve(x, weight, assign, self.bias, window, self.groups, center=center)

    def _at_once(self, x: Tensor, weight: Tensor, geometry: Geometry, window: Window) -> Tensor | None:
        """Assign and convolve in one step, or None where that is not possible."""
        return None

    def extra_repr(self) -> str:
        settings = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        own = Window.of(self.kernel_size, self.stride, self.padding, self.dilation) != self.window  # of a convolution
        padding = "'same'" if self.pads_same else f"{self.window.padding} on four sides" if own else repr(self.padding)
        settings += [f"padding={padding}"] if padding != "(0, 0)" else []
        settings += [f"dilation={self.dilation}"] if self.dilation != (1, 1) else []
        settings += [f"groups={self.groups}"] if self.groups != 1 else []
        settings += ["bias=False"] if self.bias is None else []
        settings += [f"kernels={self.kernels}"]
        settings += [f"invalid={self.invalid!r}"] if self.invalid != "same" else []
        return ", ".join(settings)


class MalleableConv2d(DepthConv2d):
    """Convolves with K kernels that learn how far they reach along the depth axis (paper, Eq. 8).

    The first eight arguments are ``nn.Conv2d``'s, and so is the output. On top of the weights there are 2K + 3 numbers:

    - ``centers`` (K + 2,): where along the depth axis each kernel looks, in grid cells; the outer two are the borders.
    - ``temperature``: how softly neighbouring kernels share a pixel.
    - ``rebalance`` (K,): b_k; ``scales`` s = softmax(b) weigh the kernels' outputs.

    Args:
        kernels: K.
        centers: a_0 … a_{K+1} to start from; −(K+1)/2 … (K+1)/2 by default.
        temperature: t > 0 to start from.
        learnable: which of ``"centers"``, ``"temperature"`` and ``"rebalance"`` are trained; the others stay as set.
        invalid: what a tap without depth counts as: ``"same"`` depth as the center, ``"uniform"`` over all K + 2
            classes, or ``"ignore"``.

    Example:
        >>> import torch, malleable as mb
        >>> conv = mb.MalleableConv2d(64, 64, 3, padding=1)
        >>> geometry = mb.Geometry(depth=torch.rand(2, 1, 240, 320) + 1, focal=260.0)
        >>> conv(torch.rand(2, 64, 60, 80), geometry).shape
        torch.Size([2, 64, 60, 80])
    """

    gain: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        kernels: int = 3,
        centers: Sequence[float] | None = None,
        temperature: float = 1.0,
        learnable: Sequence[str] = LEARNABLE,
        invalid: Invalid = "same",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            kernels=kernels, invalid=invalid, device=device, dtype=dtype
        )  # fmt: skip
        if centers is not None and not hasattr(centers, "__len__"):
            raise ValueError(f"centers must be K + 2 = {kernels + 2} numbers, got {centers}")
        if centers is not None and (len(centers) != kernels + 2 or not all(map(math.isfinite, centers))):
            raise ValueError(
                f"centers must have K + 2 = {kernels + 2} entries, all finite, got {len(centers)}: {list(centers)}"
            )
        learnable = (learnable,) if isinstance(learnable, str) else tuple(learnable)
        unknown = sorted(set(learnable) - set(LEARNABLE))
        if unknown:
            raise ValueError(f"learnable must be a subset of {LEARNABLE}, got {unknown}")
        self.initial_centers = tuple(
            [k - (kernels + 1) / 2 for k in range(kernels + 2)] if centers is None else map(float, centers)
        )
        self.initial_temperature = float(temperature)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.centers = nn.Parameter(torch.empty(kernels + 2, **options), "centers" in learnable)  # a_k
        self.raw_temperature = nn.Parameter(torch.empty((), **options), "temperature" in learnable)
        self.rebalance = nn.Parameter(torch.empty(kernels, **options), "rebalance" in learnable)  # b_k
        self.register_buffer("gain", torch.empty((), **options))
        self._reset_receptive_field()

    def reset_parameters(self) -> None:
        """Draw the weights anew and set the receptive field back to where it started."""
        super().reset_parameters()
        self._reset_receptive_field()

    @torch.no_grad()
    def _reset_receptive_field(self) -> None:
        self.centers.copy_(torch.tensor(self.initial_centers, dtype=torch.float64, device="cpu"))
        self.temperature = self.initial_temperature
        self.rebalance.zero_()
        self.gain.fill_(1.0)

    @classmethod
    def from_conv2d(cls, conv2d: nn.Conv2d, kernels: int = 3, **options: Any) -> Self:
        """Do as :meth:`DepthConv2d.from_conv2d`; ``gain`` makes up for what the field takes at equal depth."""
        layer = super().from_conv2d(conv2d, kernels=kernels, **options)
        # On the CPU and in full precision, whatever the layer's own device and dtype.
        centers = torch.tensor(layer.initial_centers, dtype=torch.float64, device="cpu")
        d = torch.zeros(1, dtype=torch.float64, device="cpu")
        at_equal_depth = malleable_assign(d, centers, layer.initial_temperature).mean().item()  # Σ s_k g_k, equal s_k
        if at_equal_depth < 1e-6:
            raise ValueError(
                f"centers={layer.initial_centers} with temperature={layer.initial_temperature} leave no kernel at "
                "equal depth, so the layer cannot start as the convolution; move the centers towards 0"
            )
        layer.gain.fill_(1 / at_equal_depth)
        return layer

    @property
    def temperature(self) -> Tensor:
        """Return t > 0, in at least float32.

        The parameter is t itself down to 0.5 and then approaches 0 along a hyperbola, so that no step of an optimiser
        makes t zero or negative or takes its gradient away.
        """
        return temperature_of(_at_least_float32(self.raw_temperature), _BEND, _COLDEST)

    @temperature.setter
    def temperature(self, t: float) -> None:
        if not 0 < t < math.inf:
            raise ValueError(f"temperature must be positive, got {t}")
        raw = t if t >= _BEND else 2 * _BEND - _BEND**2 / t
        if abs(raw) > torch.finfo(self.raw_temperature.dtype).max:
            raise ValueError(f"temperature {t} is too small or too large for {self.raw_temperature.dtype}")
        with torch.no_grad():
            self.raw_temperature.fill_(raw)

    @property
    def scales(self) -> Tensor:
        """Return s = softmax(b), (K,), which sums to 1 (Eq. 9)."""
        return _at_least_float32(self.rebalance).softmax(0)

    def receptive_field(self, d: float | Tensor) -> Tensor:
        """Return g_k at relative depth differences ``d`` of any shape: (K, *d.shape)."""
        centers = _at_least_float32(self.centers)
        d = torch.as_tensor(d, device=centers.device)
        d = d.to(torch.promote_types(d.dtype, centers.dtype))
        return malleable_assign(d.unsqueeze(0), centers, self.temperature)[0]

    def at_equal_depth(self) -> Tensor:
        return super().at_equal_depth() * self.scales * self.gain

    def assign(self, geometry: Geometry, size: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        d, valid = geometry.relative_depth(*self.view(geometry, size), dtype)
        scale = (self.scales * self.gain).to(dtype)
        assign = scaled_assign(d, self.centers.to(dtype), self.temperature.to(dtype), scale)
        return handle_invalid(assign, valid, self.invalid, scale)

    def _at_once(self, x: Tensor, weight: Tensor, geometry: Geometry, window: Window) -> Tensor | None:
        kind, base = type(self), MalleableConv2d
        as_written = kind.assign is base.assign and kind.scales is base.scales and kind.temperature is base.temperature
        if self.invalid != "same" or not as_written or "assign" in vars(self) or not is_direct(x):
            return None
        own: dict[str, Any] = {**self._parameters, **self._buffers}  # attributes of a module are slow
        try:
            field = (own["centers"], own["raw_temperature"], own["rebalance"], own["gain"], (_BEND, _COLDEST))
        except KeyError:  # a parametrization computes one of them
            return None
        d, _ = geometry.relative_depth(window, x.shape[-2:])
        return malleable_conv2d(x, weight, self.bias, d, *field, window, self.groups)

    def extra_repr(self) -> str:
        parameters = zip(LEARNABLE, (self.centers, self.raw_temperature, self.rebalance), strict=True)
        learnable = tuple(name for name, parameter in parameters if parameter.requires_grad)
        return super().extra_repr() + (f", learnable={learnable}" if learnable != LEARNABLE else "")


class Conv25d(DepthConv2d):
    """Convolves in 2.5D: K kernels split the depth axis into cells of fixed width (paper, Eq. 11).

    Arguments are those of :class:`MalleableConv2d`, less those of the learned receptive field.

    Example:
        >>> import torch, malleable as mb
        >>> mb.Conv25d(8, 8, 3).receptive_field(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """

    def receptive_field(self, d: float | Tensor) -> Tensor:
        """Return g_k at relative depth differences ``d`` of any shape: (K, *d.shape)."""
        return hard_assign(torch.as_tensor(d).unsqueeze(0), self.kernels)[0]

    def assign(self, geometry: Geometry, size: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        d, valid = geometry.relative_depth(*self.view(geometry, size), dtype)
        return handle_invalid(hard_assign(d, self.kernels), valid, self.invalid)


class DepthAwareConv2d(DepthConv2d):
    """Convolves depth-aware: one kernel, whose taps fade with their distance in metres (paper, Eq. 10).

    Args:
        alpha: per metre; the other arguments as :class:`MalleableConv2d`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        alpha: float = 8.3,
        invalid: Invalid = "same",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            kernels=1, invalid=invalid, device=device, dtype=dtype
        )  # fmt: skip
        self.alpha = _check_alpha(alpha)

    def receptive_field(self, difference: float | Tensor) -> Tensor:
        """Return g_1 at depth differences in metres, the only unit this layer knows: (1, *difference.shape)."""
        return depth_aware_assign(torch.as_tensor(difference).unsqueeze(0), self.alpha)[0]

    def assign(self, geometry: Geometry, size: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        difference, valid = geometry.depth_difference(*self.view(geometry, size), dtype)
        return handle_invalid(depth_aware_assign(difference, self.alpha), valid, self.invalid)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}"


class DepthAwareAvgPool2d(nn.Module):
    """Averages over taps that fade with their distance in metres from the center, as in depth-aware convolution.

    ``y(i) = Σ_p g(i, i+p) x(i+p) / Σ_p g(i, i+p)`` over the taps inside the map: on flat or missing depth this is
    ``nn.AvgPool2d(count_include_pad=False)``.

    Args:
        kernel_size, stride, padding: as for ``nn.AvgPool2d``; stride is kernel_size by default.
        alpha: per metre.
    """

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, *, alpha: float = 8.3) -> None:
        super().__init__()
        if isinstance(padding, str):
            raise ValueError(f"padding must be a number or a pair for pooling, got {padding!r}")
        self.window = Window.of(kernel_size, kernel_size if stride is None else stride, padding)
        self.alpha = _check_alpha(alpha)

    def forward(self, x: Tensor, geometry: Geometry) -> Tensor:
        """Map x (N, C, H, W), at any rate of the geometry's image, to (N, C, Hout, Wout)."""
        channels = x.shape[1] if x.ndim == 4 else 0
        weight = x.new_ones(channels, 1, *self.window.kernel_size)
        _check_inputs(x, weight, lambda size: self.window, channels, geometry)
        dtype = torch.promote_types(x.dtype, torch.float32)
        size = x.shape[-2:]
        g = depth_aware_assign(geometry.depth_difference(self.window, size, dtype).value, self.alpha)
        inside = torch.cat(list(self.window.views(x.new_ones(1, 1, *size, dtype=dtype))), dim=1)
        g = g * inside.unsqueeze(1)
        # A window that lies wholly in the padding has nothing to average and gives 0.
        g = g / g.sum(2, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
        return convolve(x, weight, g, None, self.window, channels)

    def extra_repr(self) -> str:
        kernel, stride, padding = self.window.kernel_size, self.window.stride, self.window.padding[::-2]
        return f"kernel_size={kernel}, stride={stride}, padding={padding}, alpha={self.alpha}"


def _assigns_as_written(layer: DepthConv2d) -> bool:
    """Tell whether the layer's :meth:`assign` belongs to its :meth:`receptive_field`: either may be another's."""
    kind = type(layer)
    return not vars(layer).keys() & {"assign", "receptive_field"} and any(
        kind.assign is own.assign and kind.receptive_field is own.receptive_field
        for own in (MalleableConv2d, Conv25d, DepthAwareConv2d)
    )


def _check_inputs(
    x: Tensor, weight: Tensor, window_on: Callable[[Sequence[int]], Window], groups: int, geometry: Geometry
) -> None:
    """Refuse features that the layer cannot take and a geometry that cannot belong to them, before it is measured."""
    if torch.compiler.is_compiling():  # symbolic sizes make a compiler prove each of these; the operator checks too
        return
    check_features(x, weight, window_on(x.shape[-2:]), groups)
    if not isinstance(geometry, Geometry):
        raise TypeError(f"geometry must be a malleable.Geometry(depth, focal), got {type(geometry).__name__}")
    depth = geometry.depth
    if depth.shape[0] != x.shape[0]:
        raise ValueError(f"geometry has a batch of {depth.shape[0]} depth maps but x a batch of {x.shape[0]} samples")
    if depth.device != x.device:
        raise ValueError(f"geometry is on {depth.device} but x on {x.device}; use geometry.to({str(x.device)!r})")


def _check_alpha(alpha: float) -> float:
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha must be a number ≥ 0 per metre, got {alpha}")
    return float(alpha)


def _at_least_float32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
