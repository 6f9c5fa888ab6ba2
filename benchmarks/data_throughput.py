"""Samples per second of the synthetic worlds and of the training loader. Prints Markdown tables.

    python benchmarks/data_throughput.py [--workers 0 1 2]

The loader reads a data set in the folder layout at 480 × 640 (lossless PNG, written for the purpose), applies the
paper's training augmentation with a crop of 480 × 480 and makes batches of 16.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from malleable.data import FolderDataset, FolderWriter, SyntheticScenes, step_loader, train_transform


def synthetic(world: str, size: tuple[int, int], count: int) -> tuple[float, float]:
    """Samples per second of wall clock and of processor time, one process."""
    scenes = SyntheticScenes(world, size=size, length=count + 1)
    scenes[count]
    wall, cpu = time.perf_counter(), time.process_time()
    for index in range(count):
        scenes[index]
    return count / (time.perf_counter() - wall), count / (time.process_time() - cpu)


def write_folder(root: Path, count: int) -> FolderDataset:
    scenes = SyntheticScenes("rooms", size=(480, 640), length=count)
    writer = FolderWriter(root, "rooms", scenes.classes, scenes.palette)
    for index in range(count):
        writer.write(scenes[index])
    writer.finish({"train": scenes.ids})
    return FolderDataset(root, "train")


def loader(data: FolderDataset, workers: int, steps: int) -> tuple[float, float]:
    """Samples per second of wall clock, after the first batch, and of processor time, workers included."""
    cpu = cpu_seconds()
    batches = iter(step_loader(data, train_transform((480, 480)), batch_size=16, steps=steps + 1, workers=workers))
    next(batches)
    wall = time.perf_counter()
    for _ in batches:
        pass
    wall = time.perf_counter() - wall
    del batches  # ends the workers, whose time is counted only then
    return 16 * steps / wall, 16 * (steps + 1) / (cpu_seconds() - cpu)


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| synthetic scenes, one core | samples/s | samples per CPU second |\n|---|---|---|")
    for world in ("rooms", "streets"):
        for size, count in (((120, 160), 100), ((480, 640), 10)):
            wall, cpu = synthetic(world, size, count)
            print(f"| {world} {size[1]}×{size[0]} | {wall:.0f} | {cpu:.0f} |")
    print("\n| loader, 640×480, paper's augmentation, batch 16 | samples/s | samples per CPU second |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = write_folder(Path(folder) / "rooms", 32)
        for workers in options.workers:
            wall, cpu = loader(data, workers, options.steps)
            print(f"| {workers} workers | {wall:.0f} | {cpu:.0f} |")


if __name__ == "__main__":
    main()
