"""The Triton kernels for depthwise convolutions, which have no sum over channels and so nothing for tensor cores to do.

All of it is multiply-adds in float32 on tiles that lie as the maps do: (pixels, channels) for channels-last ones, else
(channels, pixels). The K weights of a tap are mixed first, Σ_k assign_k · w_k, and meet the features once: K + 1
multiply-adds a tap, not 2 K. IN_C are all channels. Weights lie as (taps, K, channels), the assignment as
(N, K, taps, Hout, Wout).
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from malleable.ops.engines.triton.kernels import _inputs_of_phase, _pixels, _read, _reader, _write


@triton.jit
def _zeros(BLOCK_P: tl.constexpr, BLOCK_IN: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    if CHANNELS_LAST:
        return tl.zeros((BLOCK_P, BLOCK_IN), tl.float32)
    else:  # noqa: RET505 - Triton drops a branch, not what follows it
        return tl.zeros((BLOCK_IN, BLOCK_P), tl.float32)


@triton.jit
def _of_pixels(at, inside, CHANNELS_LAST: tl.constexpr):
    """Read a number for each pixel, to be broadcast over channels."""
    numbers = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if CHANNELS_LAST:
        return numbers[:, None]
    else:  # noqa: RET505
        return numbers[None, :]


@triton.jit
def _of_channels(at, live, CHANNELS_LAST: tl.constexpr):
    """Read a number for each channel, to be broadcast over pixels."""
    return _of_pixels(at, live, not CHANNELS_LAST)


@triton.jit(do_not_specialize=["size_class"])
def forward_kernel(
    x, weight, assign, y,
    batch, in_h, in_w, out_h, out_w, stride_h, stride_w, top, left, dilation_h, dilation_w, size_class,
    KERNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_C: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Compute y_c(i) = Σ_p (Σ_k assign_k(i, p) · w_k,c(p)) · x_c(i + p). Grid: (pixel blocks · channel blocks,)."""
    TAPS: tl.constexpr = KH * KW
    BLOCKS: tl.constexpr = (IN_C + BLOCK_IN - 1) // BLOCK_IN
    pixel = tl.program_id(0) // BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(0) % BLOCKS * BLOCK_IN + tl.arange(0, BLOCK_IN)
    live_p, live_c = pixel < batch * out_h * out_w, c < IN_C
    n, h, w = _pixels(pixel, out_h, out_w)
    at_assign = assign + n * (KERNELS * TAPS) * (out_h * out_w) + h * out_w + w
    acc = _zeros(BLOCK_P, BLOCK_IN, CHANNELS_LAST)
    for i in range(KH):
        ih = h * stride_h - top + i * dilation_h
        for j in tl.static_range(KW):
            iw = w * stride_w - left + j * dilation_w
            inside = live_p & (ih >= 0) & (ih < in_h) & (iw >= 0) & (iw < in_w)
            patch = _read(x, n, ih, iw, inside, c, live_c, in_h, in_w, IN_C, CHANNELS_LAST)
            mixed = _zeros(BLOCK_P, BLOCK_IN, CHANNELS_LAST)
            for k in tl.static_range(KERNELS):
                at = at_assign + (k * TAPS + i * KW + j) * (out_h * out_w)
                row = weight + ((i * KW + j) * KERNELS + k) * IN_C + c
                mixed += _of_pixels(at, inside, CHANNELS_LAST) * _of_channels(row, live_c, CHANNELS_LAST)
            acc += mixed * patch.to(tl.float32)
    _write(y, acc, n, h, w, live_p, c, live_c, out_h, out_w, IN_C, CHANNELS_LAST)


@triton.jit(do_not_specialize=["first_unit", "size_class"])
def data_gradients_kernel(
    grad, weight, assign, x, grad_x, grad_assign,
    batch, in_h, in_w, out_h, out_w, stride_h, stride_w, top, left, dilation_h, dilation_w, step_h, step_w,
    units, first_unit, size_class,
    KERNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_C: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    NEED_X: tl.constexpr, NEED_ASSIGN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of x and assign from one read of grad, as the kernel of the same name for matrices does.

    grad_x_c(j) = Σ_p (Σ_k assign_k(i, p) · w_k,c(p)) · grad_c(i)
    grad_assign_k(i, p) = Σ_c w_k,c(p) · x_c(j) · grad_c(i)

    grad_assign is (units of this launch, N, K, taps, Hout, Wout), a unit being a block of BLOCK_IN channels.

    Grid: (pixel blocks · units of this launch, phases).
    """
    TAPS: tl.constexpr = KH * KW
    unit = tl.program_id(0) % units
    n, h, w, live_p, first_i, first_j, count_i, count_j = _inputs_of_phase(
        tl.program_id(0) // units, tl.program_id(1), batch, in_h, in_w,
        stride_h, stride_w, top, left, dilation_h, dilation_w, step_h, step_w, KH, KW, BLOCK_P,
    )  # fmt: skip
    c = (first_unit + unit) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    live_c = c < IN_C
    if NEED_ASSIGN:
        features = _read(x, n, h, w, live_p, c, live_c, in_h, in_w, IN_C, CHANNELS_LAST)
        shares = grad_assign + unit.to(tl.int64) * batch * (KERNELS * TAPS) * (out_h * out_w)
    acc = _zeros(BLOCK_P, BLOCK_IN, CHANNELS_LAST)
    for tap in range(count_i * count_j):
        i, j = first_i + tap // count_j * step_h, first_j + tap % count_j * step_w
        oh, inside_h = _reader(h, top, i, dilation_h, stride_h, out_h)
        ow, inside_w = _reader(w, left, j, dilation_w, stride_w, out_w)
        inside = live_p & inside_h & inside_w
        gradient = _read(grad, n, oh, ow, inside, c, live_c, out_h, out_w, IN_C, CHANNELS_LAST).to(tl.float32)
        mixed = _zeros(BLOCK_P, BLOCK_IN, CHANNELS_LAST)
        for k in tl.static_range(KERNELS):
            entry = ((n * KERNELS + k) * TAPS + i * KW + j) * (out_h * out_w) + oh * out_w + ow
            w_k = _of_channels(weight + ((i * KW + j) * KERNELS + k) * IN_C + c, live_c, CHANNELS_LAST)
            if NEED_X:
                mixed += _of_pixels(assign + entry, inside, CHANNELS_LAST) * w_k
            if NEED_ASSIGN:
                share = tl.sum(features.to(tl.float32) * gradient * w_k, 1 if CHANNELS_LAST else 0)
                tl.store(shares + entry, share.to(grad_assign.dtype.element_ty), mask=inside)
        acc += mixed * gradient
    if NEED_X:
        _write(grad_x, acc, n, h, w, live_p, c, live_c, in_h, in_w, IN_C, CHANNELS_LAST)


@triton.jit(do_not_specialize=["size_class"])
def weight_gradient_kernel(
    x, grad, assign, grad_weight,
    batch, in_h, in_w, out_h, out_w, stride_h, stride_w, top, left, dilation_h, dilation_w,
    pixels_per_split, size_class,
    KERNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, IN_C: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Compute grad_w_k,c(p) = Σ_i assign_k(i, p) · grad_c(i) · x_c(i + p) of one row of taps over one split's pixels.

    Sums stay apart pixel by pixel of a tile until the end. grad_weight: (splits, K, channels, taps).
    Grid: (kernel rows · channel blocks, splits).
    """
    TAPS: tl.constexpr = KH * KW
    i, split = tl.program_id(0) % KH, tl.program_id(1)
    c = tl.program_id(0) // KH * BLOCK_IN + tl.arange(0, BLOCK_IN)
    live_c = c < IN_C
    sums = ()
    for _ in tl.static_range(KW * KERNELS):
        sums = sums + (_zeros(BLOCK_P, BLOCK_IN, CHANNELS_LAST),)  # noqa: RUF005
    end = tl.minimum((split + 1) * pixels_per_split, batch * out_h * out_w)
    for start in range(split * pixels_per_split, end, BLOCK_P):
        pixel = start + tl.arange(0, BLOCK_P)
        n, h, w = _pixels(pixel, out_h, out_w)
        ih = h * stride_h - top + i * dilation_h
        reached = (pixel < end) & (ih >= 0) & (ih < in_h)
        gradient = _read(grad, n, h, w, reached, c, live_c, out_h, out_w, IN_C, CHANNELS_LAST).to(tl.float32)
        added = ()
        for j in tl.static_range(KW):
            iw = w * stride_w - left + j * dilation_w
            inside = reached & (iw >= 0) & (iw < in_w)
            patch = _read(x, n, ih, iw, inside, c, live_c, in_h, in_w, IN_C, CHANNELS_LAST)
            product = patch.to(tl.float32) * gradient
            for k in tl.static_range(KERNELS):
                entry = ((n * KERNELS + k) * TAPS + i * KW + j) * (out_h * out_w) + h * out_w + w
                weighted = _of_pixels(assign + entry, inside, CHANNELS_LAST) * product
                added = added + (sums[j * KERNELS + k] + weighted,)  # noqa: RUF005
        sums = added
    for j in tl.static_range(KW):
        for k in tl.static_range(KERNELS):
            value = tl.sum(sums[j * KERNELS + k], 0 if CHANNELS_LAST else 1)
            at = ((split.to(tl.int64) * KERNELS + k) * IN_C + c) * TAPS + i * KW + j
            tl.store(grad_weight + at, value.to(grad_weight.dtype.element_ty), mask=live_c)
