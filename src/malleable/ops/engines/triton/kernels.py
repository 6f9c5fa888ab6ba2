"""The Triton kernels of the CUDA engine are three implicit matrix products that gather their patches as they go.

A tile is (pixels, channels). ``n, h, w`` are vectors over the pixels of a tile, ``n`` in 64 bits so that offsets are.
Weights lie as (K, groups · out, taps, in), the assignment as (N, K, taps, Hout, Wout). PACK narrow groups lie side by
side in one matrix, zero off its diagonal of blocks: GROUPS counts such packs, IN_C and OUT_C are the channels of one.
Products are summed in float32. Arithmetic on half-precision tiles is written in float32 and rounded once,
which the compiler turns into half-precision instructions.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(not isinstance(tl.cdiv, triton.JITFunction))
"""Whether TRITON_INTERPRET was set when Triton was imported: kernels then run on the CPU, slowly."""


@triton.jit
def _pixels(index, height, width):
    """Find sample, row and column of pixels counted through maps of height × width."""
    return (index // (height * width)).to(tl.int64), index // width % height, index % width


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    # The interpreter takes the bits of a bfloat16 for an integer; in float32 the products are the same.
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    else:  # noqa: RET505 - Triton drops a branch, not what follows it
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _outer(pixels, channels, PIXELS_FIRST: tl.constexpr):
    """Broadcast the two vectors against each other, as (pixels, channels) or (channels, pixels)."""
    if PIXELS_FIRST:
        return pixels[:, None], channels[None, :]
    else:  # noqa: RET505
        return pixels[None, :], channels[:, None]


@triton.jit
def _place(n, h, w, c, height, width, CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr, PIXELS_FIRST: tl.constexpr):
    """Compute the offsets of a tile in a map (N, CHANNELS, height, width)."""
    if CHANNELS_LAST:
        pixels, channels = _outer(((n * height + h) * width + w) * CHANNELS, c, PIXELS_FIRST)
    else:
        pixels, channels = _outer(n * CHANNELS * height * width + h * width + w, c * (height * width), PIXELS_FIRST)
    return pixels + channels


@triton.jit
def _mask(inside, live, PIXELS_FIRST: tl.constexpr):
    pixels, channels = _outer(inside, live, PIXELS_FIRST)
    return pixels & channels


@triton.jit
def _read(base, n, h, w, inside, c, live, height, width, CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Read a tile as it lies, zero where masked: (pixels, channels) if CHANNELS_LAST, else (channels, pixels)."""
    offsets = _place(n, h, w, c, height, width, CHANNELS, CHANNELS_LAST, CHANNELS_LAST)
    return tl.load(base + offsets, mask=_mask(inside, live, CHANNELS_LAST), other=0.0)


@triton.jit
def _write(base, tile, n, h, w, inside, c, live, height, width, CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Write a tile where ``_read`` would read it."""
    offsets = _place(n, h, w, c, height, width, CHANNELS, CHANNELS_LAST, CHANNELS_LAST)
    tl.store(base + offsets, tile.to(base.dtype.element_ty), mask=_mask(inside, live, CHANNELS_LAST))


@triton.jit
def _load(base, n, h, w, inside, c, live, height, width, CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Read a tile (pixels, channels), whichever way it lies."""
    tile = _read(base, n, h, w, inside, c, live, height, width, CHANNELS, CHANNELS_LAST)
    if CHANNELS_LAST:
        return tile
    else:  # noqa: RET505
        return tl.trans(tile)


@triton.jit
def _store(base, tile, n, h, w, inside, c, live, height, width, CHANNELS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Write a tile where ``_load`` would read it."""
    if CHANNELS_LAST:
        _write(base, tile, n, h, w, inside, c, live, height, width, CHANNELS, CHANNELS_LAST)
    else:
        _write(base, tl.trans(tile), n, h, w, inside, c, live, height, width, CHANNELS, CHANNELS_LAST)


@triton.jit
def _weights(row, o, c, IN_C: tl.constexpr, OUT_C: tl.constexpr, PACK: tl.constexpr, IN_FIRST: tl.constexpr):
    """Find the weights of outputs ``o``, in rows ``row``, for inputs ``c``, and tell which of them there are."""
    WIDTH: tl.constexpr = IN_C // PACK
    live_c, live_o = _outer(c < IN_C, o < OUT_C, IN_FIRST)
    live = live_c & live_o
    if PACK == 1:
        column = c
    else:
        column = c % WIDTH
        group_c, group_o = _outer(c // WIDTH, o // (OUT_C // PACK), IN_FIRST)
        live = live & (group_c == group_o)
    columns, rows = _outer(column, row * WIDTH, IN_FIRST)
    return rows + columns, live


@triton.jit
def _scale(tile, factor):
    """Multiply in the dtype of ``tile``, rounding once."""
    return (tile.to(tl.float32) * factor.to(tl.float32)).to(tile.dtype)


@triton.jit
def _first_tap(phase, padding, dilation, stride, SIZE: tl.constexpr):
    """Find the first of SIZE taps through which any output reads the inputs ≡ phase (mod stride); SIZE if none does."""
    first = tl.full((), SIZE, tl.int32)
    for i in tl.static_range(SIZE):
        first = tl.where((phase + padding - i * dilation) % stride == 0, tl.minimum(first, i), first)
    return first


@triton.jit
def _reader(at, padding, tap, dilation, stride, size):
    """Find the output that reads input ``at`` through ``tap``, and whether there is one."""
    reached = at + padding - tap * dilation
    return reached // stride, (reached >= 0) & (reached // stride < size)


@triton.jit
def _inputs_of_phase(
    block, phase, batch, in_h, in_w, stride_h, stride_w, top, left, dilation_h, dilation_w, step_h, step_w,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Find a block of the inputs ≡ phase (mod stride), which of them there are, and first and number of their taps."""
    phase_h, phase_w = phase // stride_w, phase % stride_w
    rows, columns = tl.cdiv(in_h - phase_h, stride_h), tl.cdiv(in_w - phase_w, stride_w)
    pixel = block * BLOCK_P + tl.arange(0, BLOCK_P)
    live = pixel < batch * tl.maximum(rows, 0) * tl.maximum(columns, 0)
    n, h, w = _pixels(pixel, tl.maximum(rows, 1), tl.maximum(columns, 1))
    first_i = _first_tap(phase_h, top, dilation_h, stride_h, KH)
    first_j = _first_tap(phase_w, left, dilation_w, stride_w, KW)
    count_i, count_j = tl.cdiv(KH - first_i, step_h), tl.cdiv(KW - first_j, step_w)
    return n, h * stride_h + phase_h, w * stride_w + phase_w, live, first_i, first_j, count_i, count_j


@triton.jit(do_not_specialize=["size_class"])
def forward_kernel(
    x, weight, assign, y,
    batch, in_h, in_w, out_h, out_w, stride_h, stride_w, top, left, dilation_h, dilation_w, size_class,
    KERNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, GROUPS: tl.constexpr, IN_C: tl.constexpr,
    OUT_C: tl.constexpr, PACK: tl.constexpr, CHANNELS_LAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """Compute y(i) = Σ_p Σ_c Σ_k (assign_k(i, p) · x_c(i + p)) · w_k,c(p): a patch is read once and weighted K times.

    Grid: (pixel blocks · out blocks, packs).
    """
    TAPS: tl.constexpr = KH * KW
    OUT_BLOCKS: tl.constexpr = (OUT_C + BLOCK_OUT - 1) // BLOCK_OUT
    IN_BLOCKS: tl.constexpr = (IN_C + BLOCK_IN - 1) // BLOCK_IN
    group = tl.program_id(1)
    pixel = tl.program_id(0) // OUT_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    o = tl.program_id(0) % OUT_BLOCKS * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    live_p, live_o = pixel < batch * out_h * out_w, o < OUT_C
    n, h, w = _pixels(pixel, out_h, out_w)
    at_assign = assign + n * (KERNELS * TAPS) * (out_h * out_w) + h * out_w + w
    acc = tl.zeros((BLOCK_P, BLOCK_OUT), tl.float32)
    for step in range(TAPS * IN_BLOCKS):
        p = step // IN_BLOCKS
        c = step % IN_BLOCKS * BLOCK_IN + tl.arange(0, BLOCK_IN)
        live_c = c < IN_C
        ih = h * stride_h - top + p // KW * dilation_h
        iw = w * stride_w - left + p % KW * dilation_w
        inside = live_p & (ih >= 0) & (ih < in_h) & (iw >= 0) & (iw < in_w)
        c_x = group * IN_C + c
        patch = _load(x, n, ih, iw, inside, c_x, live_c, in_h, in_w, GROUPS * IN_C, CHANNELS_LAST)
        for k in tl.static_range(KERNELS):
            a = tl.load(at_assign + (k * TAPS + p) * (out_h * out_w), mask=inside, other=0.0)
            rows = ((k * GROUPS + group) * OUT_C + o) * TAPS + p
            at, live = _weights(rows, o, c, IN_C, OUT_C, PACK, True)
            w_k = tl.load(weight + at, live, 0.0)
            acc = _dot(_scale(patch, a[:, None]), w_k, acc, PRECISION)
    _store(y, acc, n, h, w, live_p, group * OUT_C + o, live_o, out_h, out_w, GROUPS * OUT_C, CHANNELS_LAST)


@triton.jit(do_not_specialize=["first_unit", "size_class"])
def data_gradients_kernel(
    grad, weight, assign, x, grad_x, grad_assign,
    batch, in_h, in_w, out_h, out_w, stride_h, stride_w, top, left, dilation_h, dilation_w, step_h, step_w,
    units, first_unit, size_class,
    KERNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, GROUPS: tl.constexpr, IN_C: tl.constexpr,
    OUT_C: tl.constexpr, PACK: tl.constexpr, CHANNELS_LAST: tl.constexpr, PRECISION: tl.constexpr,
    NEED_X: tl.constexpr, NEED_ASSIGN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """Compute both gradients that need z_k(i, p) = w_k(p)ᵀ · grad(i), from one pass of products.

    For a block of inputs j, over the taps p and the one output i that reads j through p:
    grad_x(j) = Σ_p Σ_k assign_k(i, p) · z_k and grad_assign_k(i, p) = Σ_c x_c(j) · z_k,c. Every (i, p) inside the map
    belongs to one j, so no two programs write one entry. The sum over c ends at the unit, a block of BLOCK_IN channels
    of one pack: grad_assign is (units of this launch, N, K, taps, Hout, Wout). Inputs are taken by their phase, j mod
    stride: all pixels of one phase share their taps, at most a stride-th of them in each direction. Where the
    assignment needs no gradient, grad is weighted before the product, as x is in the forward pass.

    Grid: (pixel blocks · units of this launch, phases).
    """
    TAPS: tl.constexpr = KH * KW
    OUT_BLOCKS: tl.constexpr = (OUT_C + BLOCK_OUT - 1) // BLOCK_OUT
    IN_BLOCKS: tl.constexpr = (IN_C + BLOCK_IN - 1) // BLOCK_IN
    unit = tl.program_id(0) % units
    group, block = (first_unit + unit) // IN_BLOCKS, (first_unit + unit) % IN_BLOCKS
    n, h, w, live_p, first_i, first_j, count_i, count_j = _inputs_of_phase(
        tl.program_id(0) // units, tl.program_id(1), batch, in_h, in_w,
        stride_h, stride_w, top, left, dilation_h, dilation_w, step_h, step_w, KH, KW, BLOCK_P,
    )  # fmt: skip
    c = block * BLOCK_IN + tl.arange(0, BLOCK_IN)
    live_c = c < IN_C
    c_x = group * IN_C + c
    if NEED_ASSIGN:
        features = _load(x, n, h, w, live_p, c_x, live_c, in_h, in_w, GROUPS * IN_C, CHANNELS_LAST)
    acc = tl.zeros((BLOCK_P, BLOCK_IN), tl.float32)
    z = tl.zeros((BLOCK_P, BLOCK_IN), tl.float32)
    for step in range(count_i * count_j * (KERNELS * OUT_BLOCKS)):
        tap = step // (KERNELS * OUT_BLOCKS)
        k = step // OUT_BLOCKS % KERNELS
        o = step % OUT_BLOCKS * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        live_o = o < OUT_C
        i, j = first_i + tap // count_j * step_h, first_j + tap % count_j * step_w
        oh, inside_h = _reader(h, top, i, dilation_h, stride_h, out_h)
        ow, inside_w = _reader(w, left, j, dilation_w, stride_w, out_w)
        inside = live_p & inside_h & inside_w
        o_y = group * OUT_C + o
        gradient = _load(grad, n, oh, ow, inside, o_y, live_o, out_h, out_w, GROUPS * OUT_C, CHANNELS_LAST)
        rows = ((k * GROUPS + group) * OUT_C + o) * TAPS + i * KW + j
        at, live = _weights(rows, o, c, IN_C, OUT_C, PACK, False)
        w_k = tl.load(weight + at, live, 0.0)
        entry = ((n * KERNELS + k) * TAPS + i * KW + j) * (out_h * out_w) + oh * out_w + ow
        if not NEED_ASSIGN:
            a = tl.load(assign + entry, mask=inside, other=0.0)
            acc = _dot(_scale(gradient, a[:, None]), w_k, acc, PRECISION)
        else:
            z = _dot(gradient, w_k, z, PRECISION)
            if OUT_BLOCKS == 1 or step % OUT_BLOCKS == OUT_BLOCKS - 1:
                if NEED_X:
                    acc += tl.load(assign + entry, mask=inside, other=0.0).to(tl.float32)[:, None] * z
                share = tl.sum(features.to(tl.float32) * z, 1).to(grad_assign.dtype.element_ty)
                entry += unit.to(tl.int64) * batch * (KERNELS * TAPS) * (out_h * out_w)
                tl.store(grad_assign + entry, share, mask=inside)
                z = tl.zeros((BLOCK_P, BLOCK_IN), tl.float32)
    if NEED_X:
        _store(grad_x, acc, n, h, w, live_p, c_x, live_c, in_h, in_w, GROUPS * IN_C, CHANNELS_LAST)


@triton.jit(do_not_specialize=["size_class"])
def weight_gradient_kernel(
    x, grad, assign, grad_weight,
    batch, in_h, in_w, out_h, out_w, stride_h, stride_w, top, left, dilation_h, dilation_w,
    pixels_per_split, size_class,
    KERNELS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, GROUPS: tl.constexpr, IN_C: tl.constexpr,
    OUT_C: tl.constexpr, PACK: tl.constexpr, CHANNELS_LAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """Compute grad_w_k(p) = Σ_i (assign_k(i, p) · grad(i)) · x(i + p)ᵀ over one split's pixels, all K from one read.

    grad_weight: (splits, K, groups · out, taps, in). Grid: (taps · in blocks · out blocks, packs, splits).
    """
    TAPS: tl.constexpr = KH * KW
    IN_BLOCKS: tl.constexpr = (IN_C + BLOCK_IN - 1) // BLOCK_IN
    group, split = tl.program_id(1), tl.program_id(2)
    p = tl.program_id(0) % TAPS
    c = tl.program_id(0) // TAPS % IN_BLOCKS * BLOCK_IN + tl.arange(0, BLOCK_IN)
    o = tl.program_id(0) // TAPS // IN_BLOCKS * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    live_c, live_o = c < IN_C, o < OUT_C
    sums = ()
    for _ in tl.static_range(KERNELS):
        sums = sums + (tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32),)  # noqa: RUF005
    end = tl.minimum((split + 1) * pixels_per_split, batch * out_h * out_w)
    for start in range(split * pixels_per_split, end, BLOCK_P):
        pixel = start + tl.arange(0, BLOCK_P)
        n, h, w = _pixels(pixel, out_h, out_w)
        ih = h * stride_h - top + p // KW * dilation_h
        iw = w * stride_w - left + p % KW * dilation_w
        inside = (pixel < end) & (ih >= 0) & (ih < in_h) & (iw >= 0) & (iw < in_w)
        c_x = group * IN_C + c
        patch = _load(x, n, ih, iw, inside, c_x, live_c, in_h, in_w, GROUPS * IN_C, CHANNELS_LAST)
        offsets = _place(n, h, w, group * OUT_C + o, out_h, out_w, GROUPS * OUT_C, CHANNELS_LAST, False)
        gradient = tl.load(grad + offsets, mask=_mask(inside, live_o, False), other=0.0)  # (out, pixels)
        entry = (n * (KERNELS * TAPS) + p) * (out_h * out_w) + h * out_w + w
        added = ()
        for k in tl.static_range(KERNELS):
            a = tl.load(assign + entry + k * TAPS * (out_h * out_w), mask=inside, other=0.0)
            added = added + (_dot(_scale(gradient, a[None, :]), patch, sums[k], PRECISION),)  # noqa: RUF005
        sums = added
    for k in tl.static_range(KERNELS):
        row = ((split.to(tl.int64) * KERNELS + k) * GROUPS + group) * OUT_C
        at, live = _weights((row + o) * TAPS + p, o, c, IN_C, OUT_C, PACK, False)
        tl.store(grad_weight + at, sums[k].to(grad_weight.dtype.element_ty), live)
