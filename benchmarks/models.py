"""DeepLabv3+ with depth-seeing convolutions against its RGB baseline: building, one forward pass, one training step.

    python benchmarks/models.py                     # resnet50s, 480×640, as the bars are stated
    python benchmarks/models.py --backbone resnet18 --size 120 160 --repeats 9

Both networks are timed in turn, so that a change of the machine's speed meets both; times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import malleable as mb
from malleable.models import DeepLabV3Plus

BARS = {"build and forward": 1.12, "training step": 1.15}
"""Times the RGB baseline's, at most."""


def build(backbone: str, conv: str | None, classes: int) -> DeepLabV3Plus:
    torch.manual_seed(0)
    return mb.deeplabv3plus(backbone, num_classes=classes, conv=conv, pretrained=False)


def inputs(batch: int, size: tuple[int, int]) -> dict[str, torch.Tensor]:
    """An image, a slanted wall with a box before it, a focal length of one image width."""
    height, width = size
    depth = torch.linspace(2, 6, width).expand(batch, 1, height, width).clone()
    depth[..., height // 4 : height // 2, width // 4 : width // 2] = 1.5
    return {
        "rgb": torch.randn(batch, 3, height, width),
        "depth": depth,
        "focal": torch.full((batch,), float(width)),
    }


def forward(net: DeepLabV3Plus, size: tuple[int, int]) -> Callable[[], object]:
    batch = inputs(1, size)
    net.eval()

    def run() -> object:
        with torch.inference_mode():
            return net(**batch)

    return run


def training_step(net: DeepLabV3Plus, size: tuple[int, int], classes: int) -> Callable[[], object]:
    batch = inputs(2, size)  # the batch norm of the ASPP's pooled branch needs two samples
    labels = torch.randint(classes, (2, *size))
    optimizer = torch.optim.SGD(mb.parameter_groups(net, lr=1e-4, weight_decay=1e-4), momentum=0.9)
    net.train()

    def run() -> None:
        loss = torch.nn.functional.cross_entropy(net(**batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return run


def medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each, timed in turn after one unmeasured round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round_:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="resnet50s")
    parser.add_argument("--conv", default="malleable", choices=["malleable", "conv25d", "depth_aware"])
    parser.add_argument("--size", type=int, nargs=2, default=[480, 640], metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--classes", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    size = (options.size[0], options.size[1])
    kinds: dict[str, str | None] = {"rgb": None, options.conv: options.conv}
    nets = {name: build(options.backbone, conv, options.classes) for name, conv in kinds.items()}

    def build_and_forward(conv: str | None) -> object:
        return forward(build(options.backbone, conv, options.classes), size)()

    measured = {
        "build and forward": medians({n: lambda c=c: build_and_forward(c) for n, c in kinds.items()}, options.repeats),
        "forward": medians({name: forward(net, size) for name, net in nets.items()}, options.repeats),
        "training step": medians(
            {name: training_step(net, size, options.classes) for name, net in nets.items()}, options.repeats
        ),
    }
    if options.json:
        print(json.dumps(measured, indent=2))
        return
    for name, seconds in measured.items():
        ratio = seconds[options.conv] / seconds["rgb"]
        bar = f", bar {BARS[name]}×" if name in BARS else ""
        print(f"{name:18} {seconds['rgb']:8.3f} s → {seconds[options.conv]:8.3f} s   {ratio:.2f}×{bar}")


if __name__ == "__main__":
    main()
