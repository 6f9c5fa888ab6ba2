"""``malleable bench`` measures the layers against the plain convolution that does the same multiply-adds.

Times on a shared machine wander. Every ratio therefore comes from one process that takes turns between the two sides,
and from the fastest of several rounds.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import time
import timeit
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from malleable.files import check_free, write_whole
from malleable.geometry import Geometry
from malleable.inference.load import choose_device
from malleable.layers import Conv25d, DepthConv2d, MalleableConv2d
from malleable.reports.tables import print_cells

Row = dict[str, Any]
Placeable = TypeVar("Placeable", bound=Tensor | nn.Module)

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


# name, channels, channels of a group, kernel size, stride, size
GROUPS = [
    ("depthwise 3×3", 96, 1, 3, 1, 56),
    ("depthwise 3×3", 240, 1, 3, 2, 28),
    ("depthwise 3×3", 672, 1, 3, 1, 7),
    ("depthwise 5×5", 240, 1, 5, 1, 28),
    ("depthwise 5×5", 240, 1, 5, 2, 28),
    ("depthwise 7×7", 96, 1, 7, 1, 56),
    ("depthwise 7×7", 384, 1, 7, 1, 14),
    ("depthwise 7×7", 96, 1, 7, 2, 56),
    ("groups of 4", 128, 4, 3, 1, 56),
    ("groups of 8", 256, 8, 3, 1, 28),
    ("groups of 16", 512, 16, 3, 1, 14),
    ("groups of 24", 48, 24, 3, 1, 56),
    ("groups of 24", 336, 24, 3, 2, 28),
]


def bench(
    out: Path | None = None,
    rounds: int = 7,
    only: tuple[str, ...] | None = None,
    overwrite: bool = False,
    device: str = "cpu",
) -> None:
    """Measure the layers and print one table per question.

    On a GPU maps and weights are channels-last, times are those between two CUDA events with caches cleared before, and
    memory is what PyTorch's allocator gives away.

    Args:
        out: a JSON file for the numbers.
        rounds: how many turns each side gets; the fastest counts.
        only: some of "layers", "bfloat16", "hard", "groups", "calls", "networks", "network", "memory";
            all by default.
        overwrite: replace a file that exists.
        device: cpu, cuda or cuda:N.
    """
    place = choose_device(device)
    if out is not None:
        check_free(out, overwrite)
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    unknown = sorted(set(only or []) - set(QUESTIONS))
    if unknown:
        raise ValueError(f"only must be some of {', '.join(QUESTIONS)}, got {unknown}")
    environment = {
        "date": date.today().isoformat(),
        "processor": torch.cuda.get_device_name(place) if place.type == "cuda" else _processor(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(" · ".join(f"{key} {value}" for key, value in environment.items()))
    results: dict[str, Any] = {"environment": environment}
    for name, (title, measure) in QUESTIONS.items():
        if only is None or name in only:
            rows = results[name] = measure(rounds, place)
            print_cells([list(rows[0]), *([str(value) for value in row.values()] for row in rows)], title)
    if out is not None:
        write_whole(out, (json.dumps(results, indent=1) + "\n").encode())


def layers(
    rounds: int,
    device: torch.device,
    kind: type[DepthConv2d] = MalleableConv2d,
    batches: tuple[int, ...] = (1,),
    channels: int = 0,
) -> list[Row]:
    """Race the layers of ``kind`` with at least ``channels``, K = 3, against nn.Conv2d(K·C, C)."""
    rows = []
    for shape in LAYERS:
        for batch in batches if shape.channels >= channels else ():
            window = (3, shape.stride, shape.dilation, shape.dilation)
            layer = kind(shape.channels, shape.channels, *window, bias=False, kernels=KERNELS)
            limit = nn.Conv2d(KERNELS * shape.channels, shape.channels, *window, bias=False)
            ratios = compare(layer, limit, batch, shape.size, shape.rate, rounds, device)
            rows.append({"layer": shape.name, "batch": batch, **ratios})
    return rows


def bfloat16(rounds: int, device: torch.device) -> list[Row]:
    """Race the malleable layers under autocast, both sides in bfloat16."""
    with torch.autocast(device.type, torch.bfloat16):
        return layers(rounds, device)


def groups(rounds: int, device: torch.device) -> list[Row]:
    """Race depthwise and grouped convolutions, batch 1 and 4, against nn.Conv2d of the same groups, which has one."""
    rows = []
    for name, channels, width, kernel, stride, size in GROUPS:
        options: dict[str, Any] = {"stride": stride, "padding": kernel // 2, "groups": channels // width, "bias": False}
        for batch in (1, 4):
            layer = MalleableConv2d(channels, channels, kernel, kernels=KERNELS, **options)
            conv = nn.Conv2d(channels, channels, kernel, **options)
            label = f"{name}, {channels} channels, {size}², stride {stride}"
            ratios = compare(layer, conv, batch, size, rate=4, rounds=rounds, device=device)
            rows.append({"layer": label, "batch": batch, **ratios})
    return rows


def calls(rounds: int, device: torch.device) -> list[Row]:
    """Time one call on a map of 4×4, where there is next to nothing to compute, its geometry shared or new."""
    depth = put(one_cell_depth(1, 128, reach=6), device)
    geometry, x = Geometry(depth, FOCAL), put(torch.randn(1, 8, 4, 4), device)
    rows = []
    for name, count in (("dense", 1), ("depthwise", 8)):
        layer = put(MalleableConv2d(8, 8, 3, padding=1, groups=count, kernels=KERNELS), device)
        runs: dict[str, Callable[[], Tensor]] = {
            "nn.Conv2d": partial(put(nn.Conv2d(8, 8, 3, padding=1, groups=count), device), x),
            "shared geometry": partial(layer, x, geometry),
            "new geometry": lambda layer=layer: layer(x, Geometry(depth, FOCAL)),  # type: ignore[misc]
        }
        for mode in ("inference", "training"):
            best = dict.fromkeys(runs, float("inf"))
            with torch.set_grad_enabled(mode == "training"):
                for _ in range(20 * rounds):
                    for side, run in runs.items():
                        best[side] = min(best[side], timeit.timeit(run, number=20) / 20)
            rows.append({"layer": name, "mode": mode} | {f"{k} µs": round(1e6 * v, 1) for k, v in best.items()})
    return rows


def networks(rounds: int, device: torch.device) -> list[Row]:
    """Race the forward pass of timm's networks with K = 3, in the first layer of each stage or all, against theirs."""
    import timm

    from malleable.models.convert import convert

    image, depth = put(torch.randn(4, 3, 224, 224), device), put(one_cell_depth(4, 224, reach=6), device)
    rows = []
    for name in ("regnety_016", "mobilenetv3_large_100", "efficientnet_b0", "resnext50_32x4d", "convnext_tiny"):
        for where in ("first-of-stage", "all"):
            original = put(timm.create_model(name).eval(), device)
            converted = put(convert(timm.create_model(name).eval(), "malleable", KERNELS, where), device)
            ours, theirs = partial(converted, image, depth=depth, focal=FOCAL), partial(original, image)
            rows.append({"network": name, "where": where, **race(ours, theirs, rounds, device, step=False)})
    return rows


def network(rounds: int, device: torch.device) -> list[Row]:
    """Race DeepLabv3+ with K = 3 in four layers against its RGB baseline, 480×640, 40 classes."""
    from malleable.models import DeepLabV3Plus

    image = put(torch.randn(2, 3, 480, 640), device)  # two: the ASPP's pooled branch normalises over the batch
    depth = torch.linspace(2, 6, 640).expand(2, 1, 480, 640).clone()  # a slanted wall, a box before it
    depth[..., 120:240, 160:320] = 1.5
    depth = put(depth, device)
    rows = []
    for backbone in ("resnet18", "resnet50s"):
        ours, theirs = (put(DeepLabV3Plus(backbone, 40, conv), device) for conv in ("malleable", None))
        ratios = race(partial(ours, image, depth, FOCAL), partial(theirs, image, depth, FOCAL), rounds, device)
        rows.append({"backbone": backbone, "batch": 2, **ratios})
    return rows


def memory(rounds: int, device: torch.device) -> list[Row]:
    """Measure the peak memory of one training step on res2, batch 16, 120×120, beyond what is there before it."""
    if device.type == "cpu" and not Path("/proc/self/clear_refs").exists():
        raise OSError("memory is measured through /proc, which this system does not have; leave it out with --only")
    context = multiprocessing.get_context("spawn")  # a fresh process each: peaks never fall
    rows = []
    for name in ("nn.Conv2d(64, 64)", "malleable, K = 3", "unfold, K = 3"):
        with context.Pool(1) as pool:
            rows.append({"step": name, "MiB": round(pool.apply(_peak_of_a_step, (name, device)) / 2**20, 1)})
    return rows


QUESTIONS: dict[str, tuple[str, Callable[[int, torch.device], list[Row]]]] = {
    "layers": ("Malleable, K = 3, float32: time over nn.Conv2d(3·C, C)", partial(layers, batches=(1, 4))),
    "bfloat16": ("The same under bfloat16 autocast: time over nn.Conv2d(3·C, C) in bfloat16", bfloat16),
    "hard": (
        "2.5D, K = 3, hard: time over nn.Conv2d(3·C, C)",
        partial(layers, kind=Conv25d, channels=128),
    ),
    "groups": ("Malleable with groups, K = 3: time over nn.Conv2d with the same groups (one kernel)", groups),
    "calls": ("One call of a layer of 8 channels on a map of 4×4, K = 3", calls),
    "networks": ("timm's networks with K = 3, forward, batch 4, 224×224: time over the original", networks),
    "network": ("DeepLabv3+ with K = 3 in res2 … res5, 480×640: time over the RGB baseline", network),
    "memory": ("Training step on res2, batch 16, 120×120: peak memory beyond inputs and weights", memory),
}


def compare(
    layer: DepthConv2d, limit: nn.Conv2d, batch: int, size: int, rate: int, rounds: int, device: torch.device
) -> Row:
    """Race a layer, its geometry and assignment included, against a plain convolution of maps of the same size."""
    layer, limit = put(layer, device), put(limit, device)
    maps = (torch.randn(batch, conv.in_channels, size, size) for conv in (layer, limit))
    x, wide = (put(map, device).requires_grad_() for map in maps)
    depth = put(one_cell_depth(batch, rate * size, reach=1.5 * rate * layer.dilation[0]), device)
    return race(lambda: layer(x, Geometry(depth, FOCAL)), lambda: limit(wide), rounds, device)


def put(thing: Placeable, device: torch.device) -> Placeable:
    """Move maps or a module to the device, channels-last on a GPU."""
    return thing if device.type == "cpu" else cast(Any, thing).to(device, memory_format=torch.channels_last)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time a call; on a GPU, which is kept busy until the call is under way, by events."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    clear_caches(device)
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


def clear_caches(device: torch.device) -> None:
    """Write more than the caches of any GPU hold."""
    torch.zeros(2**29, dtype=torch.uint8, device=device)


def race(
    ours: Callable[[], Tensor], theirs: Callable[[], Tensor], rounds: int, device: torch.device, step: bool = True
) -> Row:
    """Time forward and training step (all gradients) of both sides by turns; give the fastest, in ms, and ratios."""
    kinds = ("forward", "step") if step else ("forward",)
    times: dict[str, list[float]] = {f"{prefix}{kind}": [] for kind in kinds for prefix in ("", "limit ")}
    for turn in range(rounds + 1):
        for prefix, run in (("", ours), ("limit ", theirs)):
            with torch.no_grad():
                taken = {"forward": seconds(run, device)}
            if step:
                taken["step"] = seconds(lambda run=run: torch.autograd.backward(run().sum()), device)  # type: ignore[misc]
            if turn:  # the first turn warms up
                for kind in kinds:
                    times[f"{prefix}{kind}"].append(taken[kind])
    best = {name: 1e3 * min(values) for name, values in times.items()}
    row: Row = {f"{name} ms": round(value, 2) for name, value in best.items()}
    return row | {f"{kind} ratio": round(best[kind] / best[f"limit {kind}"], 3) for kind in kinds}


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


def _peak_of_a_step(name: str, device: torch.device) -> float:
    """Count the bytes by which a training step raises the peak of memory; needs a process of its own."""
    x = put(torch.randn(16, 64, 120, 120), device).requires_grad_()
    layer = put(MalleableConv2d(64, 64, 3, padding=1, bias=False, kernels=KERNELS), device)
    conv = put(nn.Conv2d(64, 64, 3, padding=1, bias=False), device)
    depth = put(one_cell_depth(16, 480, reach=6), device)

    def step(x: Tensor, depth: Tensor) -> None:
        if name.startswith("nn.Conv2d"):
            y = conv(x)
        elif name.startswith("malleable"):
            y = layer(x, Geometry(depth, FOCAL))
        else:
            y = unfold_form(x, layer.weight, layer.assign(Geometry(depth, FOCAL), x.shape[-2:]))
        torch.autograd.backward(y.sum())

    step(x[:1, :, :8, :8].detach(), depth[:1, :, :32, :32])  # loads libraries and makes threads
    if device.type == "cuda":
        step(x, depth)  # kernels are compiled and tuned
        x.grad = None
        torch.cuda.reset_peak_memory_stats(device)
        before = float(torch.cuda.memory_allocated(device))
        step(x, depth)
        return torch.cuda.max_memory_allocated(device) - before
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
