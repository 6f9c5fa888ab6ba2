"""``malleable bench`` measures the layers against the plain convolution that does the same multiply-adds.

Times on a shared machine wander. Every ratio therefore comes from one process that takes turns between the two sides,
and from the fastest of several rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malleable.files import check_free, write_whole
from malleable.geometry import Geometry
from malleable.layers import Conv25d, DepthConv2d, MalleableConv2d
from malleable.reports.tables import print_cells

Row = dict[str, Any]

KERNELS = 3
FOCAL = 500.0


class Shape(NamedTuple):
    """What a layer of the paper's network has to do at a 768×768 image."""

    name: str
    channels: int
    size: int
    stride: int
    dilation: int
    rate: int


LAYERS = [
    Shape("res2", 64, 192, 1, 1, 4),
    Shape("res3", 128, 192, 2, 1, 4),
    Shape("res4", 256, 96, 2, 1, 8),
    Shape("res5", 512, 48, 1, 2, 16),
]


def bench(
    out: Path | None = None, rounds: int = 7, only: tuple[str, ...] | None = None, overwrite: bool = False
) -> None:
    """Measure the layers and print one table per question.

    Args:
        out: a JSON file for the numbers.
        rounds: how many turns each side gets; the fastest counts.
        only: some of "layers", "bfloat16", "hard", "groups", "network", "memory"; all by default.
        overwrite: replace a file that exists.
    """
    if out is not None:
        check_free(out, overwrite)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    unknown = sorted(set(only or []) - set(QUESTIONS))
    if unknown:
        raise ValueError(f"only must be some of {', '.join(QUESTIONS)}, got {unknown}")
    environment = {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(" · ".join(f"{key} {value}" for key, value in environment.items()))
    results: dict[str, Any] = {"environment": environment}
    for name, (title, measure) in QUESTIONS.items():
        if only is None or name in only:
            rows = results[name] = measure(rounds)
            print_cells([list(rows[0]), *([str(value) for value in row.values()] for row in rows)], title)
    if out is not None:
        write_whole(out, (json.dumps(results, indent=1) + "\n").encode())


def layers(
    rounds: int, kind: type[DepthConv2d] = MalleableConv2d, batches: tuple[int, ...] = (1,), channels: int = 0
) -> list[Row]:
    """Race the layers of ``kind`` with at least ``channels``, K = 3, against nn.Conv2d(K·C, C)."""
    rows = []
    for shape in LAYERS:
        for batch in batches if shape.channels >= channels else ():
            window = (3, shape.stride, shape.dilation, shape.dilation)
            layer = kind(shape.channels, shape.channels, *window, bias=False, kernels=KERNELS)
            limit = nn.Conv2d(KERNELS * shape.channels, shape.channels, *window, bias=False)
            ratios = compare(layer, limit, batch, shape.size, shape.rate, rounds)
            rows.append({"layer": shape.name, "batch": batch, **ratios})
    return rows


def bfloat16(rounds: int) -> list[Row]:
    """Race the malleable layers under autocast, both sides in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return layers(rounds)


def groups(rounds: int) -> list[Row]:
    """Race grouped convolutions, batch 4, against nn.Conv2d of the same groups, which has one kernel."""
    shapes = [
        ("ConvNeXt, depthwise", 96, 96, 7, 56),
        ("ConvNeXt, depthwise", 384, 384, 7, 14),
        ("MobileNet, depthwise", 96, 96, 3, 56),
        ("ResNeXt, 32 groups", 128, 32, 3, 56),
    ]
    rows = []
    for name, channels, count, kernel, size in shapes:
        layer = MalleableConv2d(channels, channels, kernel, padding=kernel // 2, groups=count, kernels=KERNELS)
        conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=count)
        ratios = compare(layer, conv, batch=4, size=size, rate=4, rounds=rounds)
        rows.append({"layer": f"{name}, {kernel}×{kernel}, {channels} channels", **ratios})
    return rows


def network(rounds: int) -> list[Row]:
    """Race DeepLabv3+ with K = 3 in four layers against its RGB baseline, 480×640, 40 classes."""
    from malleable.models import DeepLabV3Plus

    image = torch.randn(2, 3, 480, 640)  # two: the ASPP's pooled branch normalises over the batch
    depth = torch.linspace(2, 6, 640).expand(2, 1, 480, 640).clone()  # a slanted wall, a box before it
    depth[..., 120:240, 160:320] = 1.5
    rows = []
    for backbone in ("resnet18", "resnet50s"):
        ours, theirs = (DeepLabV3Plus(backbone, 40, conv) for conv in ("malleable", None))
        ratios = race(partial(ours, image, depth, FOCAL), partial(theirs, image, depth, FOCAL), rounds)
        rows.append({"backbone": backbone, "batch": 2, **ratios})
    return rows


def memory(rounds: int) -> list[Row]:
    """Measure the peak memory of one training step on res2, batch 16, 120×120, beyond what is there before it."""
    if not Path("/proc/self/clear_refs").exists():
        raise OSError("memory is measured through /proc, which this system does not have; leave it out with --only")
    context = multiprocessing.get_context("spawn")  # a fresh process each: peaks never fall
    rows = []
    for name in ("nn.Conv2d(64, 64)", "malleable, K = 3", "unfold, K = 3"):
        with context.Pool(1) as pool:
            rows.append({"step": name, "MiB": round(pool.apply(_peak_of_a_step, (name,)) / 2**20, 1)})
    return rows


QUESTIONS: dict[str, tuple[str, Callable[[int], list[Row]]]] = {
    "layers": ("Malleable, K = 3, float32: time over nn.Conv2d(3·C, C)", partial(layers, batches=(1, 4))),
    "bfloat16": ("The same under bfloat16 autocast: time over nn.Conv2d(3·C, C) in bfloat16", bfloat16),
    "hard": (
        "2.5D, K = 3, hard: time over nn.Conv2d(3·C, C)",
        partial(layers, kind=Conv25d, channels=128),
    ),
    "groups": ("Malleable with groups, K = 3: time over nn.Conv2d with the same groups (one kernel)", groups),
    "network": ("DeepLabv3+ with K = 3 in res2 … res5, 480×640: time over the RGB baseline", network),
    "memory": ("Training step on res2, batch 16, 120×120: peak memory beyond inputs and weights", memory),
}


def compare(layer: DepthConv2d, limit: nn.Conv2d, batch: int, size: int, rate: int, rounds: int) -> Row:
    """Race a layer, its geometry and assignment included, against a plain convolution of maps of the same size."""
    x, wide = (torch.randn(batch, conv.in_channels, size, size, requires_grad=True) for conv in (layer, limit))
    depth = one_cell_depth(batch, rate * size, reach=1.5 * rate * layer.dilation[0])
    return race(lambda: layer(x, Geometry(depth, FOCAL)), lambda: limit(wide), rounds)


def race(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], rounds: int) -> Row:
    """Time forward and training step (all gradients) of both sides by turns; give the fastest, in ms, and ratios."""
    times: dict[str, list[float]] = {"forward": [], "limit forward": [], "step": [], "limit step": []}
    for _ in range(rounds + 1):
        for prefix, run in (("", ours), ("limit ", theirs)):
            with torch.no_grad():
                started = time.perf_counter()
                run()
                times[f"{prefix}forward"].append(time.perf_counter() - started)
            started = time.perf_counter()
            torch.autograd.backward(run().sum())
            times[f"{prefix}step"].append(time.perf_counter() - started)
    best = {name: 1e3 * min(values[1:]) for name, values in times.items()}  # the first turn warms up
    ratios = {f"{name} ratio": round(best[name] / best[f"limit {name}"], 3) for name in ("forward", "step")}
    return {f"{name} ms": round(value, 2) for name, value in best.items()} | ratios


def one_cell_depth(batch: int, size: int, reach: float) -> Tensor:
    """Make depth around 2 m whose relative differences spread evenly over 1.5 grid cells of ``reach`` / 1.5 pixels."""
    return 2 + reach * 2 / FOCAL * (torch.rand(batch, 1, size, size) - 0.5)


def unfold_form(x: Tensor, weight: Tensor, assign: Tensor) -> Tensor:
    """Convolve (3×3, padding 1) the usual way: unfold, K weighted copies of all patches, K matrix products."""
    batch, channels, height, width = x.shape
    kernels = assign.shape[1]
    patches = F.unfold(x, 3, padding=1).view(batch, channels, 9, -1)
    y = 0
    for k, w in enumerate(weight.view(kernels, -1, channels * 9)):
        y = y + w @ (patches * assign[:, k].flatten(2)[:, None]).flatten(1, 2)
    return torch.as_tensor(y).view(batch, -1, height, width)


def _peak_of_a_step(name: str) -> float:
    """Count the bytes by which a training step raises the peak resident memory; needs a process of its own."""
    x = torch.randn(16, 64, 120, 120, requires_grad=True)
    layer = MalleableConv2d(64, 64, 3, padding=1, bias=False, kernels=KERNELS)
    conv = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    depth = one_cell_depth(16, 480, reach=6)

    def step(x: Tensor, depth: Tensor) -> None:
        if name.startswith("nn.Conv2d"):
            y = conv(x)
        elif name.startswith("malleable"):
            y = layer(x, Geometry(depth, FOCAL))
        else:
            y = unfold_form(x, layer.weight, layer.assign(Geometry(depth, FOCAL), x.shape[-2:]))
        torch.autograd.backward(y.sum())

    step(x[:1, :, :8, :8].detach(), depth[:1, :, :32, :32])  # loads libraries and makes threads
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _resident("VmRSS")
    step(x, depth)
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    """Give a number of bytes as Linux accounts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(field))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
