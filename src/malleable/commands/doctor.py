"""``malleable doctor`` runs every engine on every device of this machine against the plain one."""

from __future__ import annotations

import copy
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from malleable import __version__
from malleable.geometry import Geometry
from malleable.inference.load import choose_device
from malleable.layers import DepthAwareConv2d, DepthConv2d, MalleableConv2d
from malleable.ops.engines import ENGINES
from malleable.ops.engines.native.build import origin
from malleable.reports.tables import print_cells

_LAYERS: dict[str, tuple[Callable[..., DepthConv2d], int, int]] = {
    "malleable 3×3": (partial(MalleableConv2d, kernels=3), 3, 1),
    "malleable 3×3, groups of 8": (partial(MalleableConv2d, kernels=3), 3, 4),
    "malleable 3×3, depthwise": (partial(MalleableConv2d, kernels=3), 3, 32),
    "malleable 7×7, depthwise": (partial(MalleableConv2d, kernels=3), 7, 32),
    "depth-aware 3×3": (DepthAwareConv2d, 3, 1),
}
"""Shown name → what makes the layer, the size of its kernels, its groups."""

_CHANNELS, _SIZE, _FOCAL = 32, 28, 60.0

_DTYPES = {
    "float64": (torch.float64, 1e-10),
    "float32": (torch.float32, 2e-4),
    "tf32": (torch.float32, 5e-3),
    "bfloat16": (torch.bfloat16, 5e-2),
    "float16": (torch.float16, 1e-2),
}
"""Shown name → dtype, and how far a tensor may be from float64's, as a part of its largest value.

tf32 is how GPUs multiply float32 unless told otherwise.
"""

_LAYOUTS = (torch.contiguous_format, torch.channels_last)


def doctor(device: str | None = None, rounds: int = 5) -> int:
    """Check each engine: output and gradients against the plain engine in float64, and its time.

    Prints one table. The exit code is 1 if any engine that runs here disagrees or fails. A time of 1 is that of
    nn.Conv2d with as many multiply-adds, on a GPU in channels-last.

    Args:
        device: cpu, cuda or cuda:N; the processor and all GPUs by default.
        rounds: how often each is timed; the fastest counts.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    devices = found if device is None else [str(choose_device(device))]
    print(f"malleable {__version__} · torch {torch.__version__} · python {platform.python_version()}")
    print(f"native engine: {origin()}")
    lines, wrong, unable = [], 0, dict[str, None]()
    for place in devices:
        for name, (make, kernel, groups) in _LAYERS.items():
            torch.manual_seed(0)
            layer = make(_CHANNELS, _CHANNELS, kernel, padding=kernel // 2, groups=groups)
            for short, (dtype, tolerance) in _DTYPES.items():
                if short == "tf32" and place == "cpu":
                    continue
                rounded = copy.deepcopy(layer).to(dtype)
                expected = _run(rounded, torch.device("cpu"), torch.float64, "plain", dtype, _LAYOUTS[0])
                for engine in ENGINES:
                    call = (rounded, torch.device(place), dtype, engine)
                    try:
                        with _tf32(short == "tf32"):
                            results = [_run(*call, dtype, layout) for layout in _LAYOUTS]
                            ratio = _ratio(*call, rounds)
                    except (RuntimeError, MemoryError) as raised:
                        _, unable_to, reason = str(raised).rpartition("cannot run this call: ")
                        if not unable_to:
                            wrong += 1
                            lines.append([name, engine, place, short, "FAILED", "", ""])
                        unable.setdefault(f"{engine} on {place}: {reason or type(raised).__name__}")
                        continue
                    pairs = [pair for found in results for pair in zip(found, expected, strict=True)]
                    error = float(torch.tensor([_distance(*pair) for pair in pairs]).max())  # Python's loses a NaN
                    agrees = error <= tolerance
                    wrong += not agrees
                    said = "yes" if agrees else "NO"
                    lines.append([name, engine, place, short, said, f"{error:.0e}", f"{ratio:.2f}"])
    heading = ["layer", "engine", "device", "dtype", "agrees", "error", "time over nn.Conv2d's"]
    print_cells([heading, *lines], "Engines against plain in float64: output and all gradients")
    for sentence in unable:
        print(f"not run: {sentence}", file=sys.stderr)
    if wrong:
        print(f"{wrong} of {len(lines)} disagree or fail; please report this table", file=sys.stderr)
    return int(wrong > 0)


@contextmanager
def _engine(name: str) -> Iterator[None]:
    with patch.dict(os.environ, MALLEABLE_ENGINE=name):
        yield


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, wanted
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _inputs(
    device: torch.device, dtype: torch.dtype, rounded: torch.dtype, layout: torch.memory_format
) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, _CHANNELS, _SIZE, _SIZE, generator=random).to(rounded).to(device, dtype)
    depth = 2 + 0.1 * torch.randn(2, 1, 4 * _SIZE, 4 * _SIZE, generator=random)
    depth[:, :, 10:40, 20:60] = 0  # some of it is unknown
    return x.to(memory_format=layout), depth.to(device)


def _run(
    layer: DepthConv2d,
    device: torch.device,
    dtype: torch.dtype,
    engine: str,
    rounded: torch.dtype,
    layout: torch.memory_format,
) -> list[Tensor]:
    """Give the output of the layer, then the gradients of its input and of its parameters, as float64 on the CPU.

    Its input is that of ``rounded``, whatever ``dtype`` it is computed in.
    """
    twin = copy.deepcopy(layer).to(device, dtype)
    x, depth = _inputs(device, dtype, rounded, layout)
    leaves = [x.requires_grad_(), *twin.parameters()]
    with _engine(engine):
        y = twin(x, Geometry(depth, _FOCAL))
        direction = torch.linspace(-1, 1, y.numel()).view_as(y).to(rounded).to(device, dtype)
        gradients = torch.autograd.grad(y, leaves, direction)
    return [tensor.detach().to("cpu", torch.float64) for tensor in (y, *gradients)]


def _ratio(layer: DepthConv2d, device: torch.device, dtype: torch.dtype, engine: str, rounds: int) -> float:
    """Time a forward pass over K of nn.Conv2d with the same groups."""
    layout = _LAYOUTS[device.type == "cuda"]
    twin = copy.deepcopy(layer).to(device, dtype)
    x, depth = _inputs(device, dtype, dtype, layout)
    size, groups = layer.kernel_size, layer.groups
    conv = nn.Conv2d(_CHANNELS, _CHANNELS, size, padding=size[0] // 2, groups=groups, device=device, dtype=dtype)
    twin, conv = twin.to(memory_format=layout), conv.to(memory_format=layout)
    geometry = Geometry(depth, _FOCAL)
    ours, theirs = float("inf"), float("inf")
    with torch.no_grad(), _engine(engine):
        for _ in range(rounds + 1):
            ours = min(ours, _time(lambda: twin(x, geometry), device))
            theirs = min(theirs, _time(lambda: conv(x), device))
    return ours / (layer.kernels * theirs)


def _time(run: Callable[[], object], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    started = now()
    run()
    return now() - started


def _distance(tensor: Tensor, expected: Tensor) -> float:
    """Give the largest difference as a part of the largest value."""
    return float((tensor - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
