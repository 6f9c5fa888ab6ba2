"""Measure one image's way through a network without a GPU: ``python benchmarks/latency.py models``.

DeepLabv3+ on two backbones, RGB beside malleable K = 1 and K = 3, in PyTorch, in ONNX Runtime, and in ONNX Runtime with
convolutions in int8, at each size with each number of threads. The folder keeps the exported networks (random weights),
so that a second call measures at once. The median and the 95th percentile of all runs count, networks take turns.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import malleable as mb
from malleable.commands.export import Deployed, write_onnx
from malleable.data import SyntheticScenes
from malleable.reports.tables import print_cells

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from int8 import Inputs, quantise

BACKBONES = ("resnet18", "mobilenetv3_large_100")
ROWS: dict[str, tuple[str | None, int]] = {"RGB": (None, 1), "K=1": ("malleable", 1), "K=3": ("malleable", 3)}


def prepare(folder: Path, backbone: str, row: str) -> dict[str, Path | torch.nn.Module]:
    """Return the network in all its forms; exports what ``folder`` does not have."""
    conv, kernels = ROWS[row]
    torch.manual_seed(0)
    net = mb.deeplabv3plus(backbone, 40, conv, kernels, pretrained=False).eval()
    exported = folder / f"{backbone}-{row}.onnx"
    if not exported.exists():
        write_onnx(net, exported)
    quantised = exported.with_suffix(".int8.onnx")
    if not quantised.exists():
        quantise(exported, SyntheticScenes(length=8), quantised)
    return {"PyTorch": Deployed(net).eval(), "ONNX Runtime": exported, "int8": quantised}


def runner(form: Path | torch.nn.Module, size: tuple[int, int], threads: int) -> Callable[[], object]:
    """Return a call that runs one synthetic room of ``size`` (height, width) through the network."""
    sample = SyntheticScenes(size=size, length=1)[0]
    if isinstance(form, Path):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Networks take turns, and threads that stayed awake for more of one would slow the next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(str(form), options, providers=["CPUExecutionProvider"])
        return partial(session.run, None, Inputs(form, [sample]).get_next())
    tensors = [t[None].as_subclass(torch.Tensor) for t in (sample.image, sample.depth)]
    return partial(form, *tensors, torch.tensor([sample.camera.focal]))


Cell = tuple[str, str]  # row, form


def measure(runs: dict[Cell, Callable[[], object]], seconds: float) -> dict[Cell, list[float]]:
    """Time the runs by turns for ``seconds`` each, in ms."""
    times: dict[Cell, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - started))
    return times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the exported networks")
    parser.add_argument("--backbones", nargs="+", default=BACKBONES)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--sizes", nargs="+", default=["320x240", "640x480"], help="width x height")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each cell")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    for backbone in arguments.backbones:
        with torch.inference_mode(False):
            forms = {row: prepare(arguments.folder, backbone, row) for row in arguments.rows}
        for size, threads in itertools.product(arguments.sizes, arguments.threads):
            width, height = map(int, size.split("x"))
            torch.set_num_threads(threads)
            runs = {
                (row, name): runner(form, (height, width), threads)
                for row in arguments.rows
                for name, form in forms[row].items()
            }
            times = measure(runs, arguments.seconds)
            cells = [["", *(f"{name} p50 / p95, ms" for name in forms[arguments.rows[0]])]]
            for row in arguments.rows:
                p = [np.percentile(times[row, name], (50, 95)) for name in forms[row]]
                cells.append([row, *(f"{p50:.0f} / {p95:.0f}" for p50, p95 in p)])
            print_cells(cells, f"{backbone}, {size}, {threads} thread{'s' if threads > 1 else ''}")


if __name__ == "__main__":
    main()
