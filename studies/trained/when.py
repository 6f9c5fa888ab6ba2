"""Ask the trained networks of a study when depth helps: how long a training, how much noise, how far, how steep.

    python studies/trained/when.py studies/trained/streets.yaml runs/trained_streets

Reads the runs that `malleable study` left in the folder, keeps what it found in when.json beside their results (in that
folder, or where the study's file says), prints it, and draws when.png. What is in the file is not measured again.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from figures import full_rows
from malleable.data import SampleDataset, open_dataset
from malleable.data.faults import noise
from malleable.data.sample import Sample
from malleable.data.tv_tensors import IGNORE
from malleable.figures.style import DASHES, LINES, Array, legend, new_figure, save, styled
from malleable.files import read_json, write_whole
from malleable.geometry import Geometry
from malleable.inference.confusion import Confusion
from malleable.inference.load import load_trained
from malleable.inference.probabilities import probabilities
from malleable.ops.window import Window
from malleable.reports.plan import Plan, read_plan
from malleable.reports.tables import markdown

NOISE = (0.0, 0.005, 0.01, 0.02, 0.04)  # standard deviation, as a part of the depth
STEPS = (0.0, 0.5, 1.5, 3.0, 6.0)  # the largest difference to a neighbour, in cells of the grid of res2
PARTS = 5  # of all pixels by their depth, equally many in each
RATE = 4  # of res2's grid

QUESTIONS = {"noise": len(NOISE), "depth": PARTS, "steepness": len(STEPS)}
"""What is asked of every network → in how many strengths or bins."""

Found = dict[str, dict[str, dict[str, list[float]]]]
"""Row → seed → question → mIoU in percent for each strength or bin."""


def steepness(sample: Sample) -> Tensor:
    """Tell how far, in cells along the depth axis, the farthest of a pixel's neighbours on res2's grid is: (H, W)."""
    height, width = sample.camera.size
    size = (-(-height // RATE), -(-width // RATE))
    geometry = Geometry(sample.depth.as_subclass(Tensor)[None], sample.camera.focal)
    differences = geometry.relative_depth(Window.of(3, padding=1), size)
    largest = differences.value[0].abs().amax(0)  # (h, w)
    return largest.repeat_interleave(RATE, 0).repeat_interleave(RATE, 1)[:height, :width]


def bins(sample: Sample, borders: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Give each question's bin for each pixel of known depth, (H, W); −1 elsewhere."""
    depth = sample.depth.as_subclass(Tensor)[0]
    for question, where in (
        ("depth", torch.bucketize(depth, borders)),
        ("steepness", torch.bucketize(steepness(sample), torch.tensor(STEPS[1:]), right=True)),
    ):
        yield question, torch.where(depth > 0, where, -1)


def depth_borders(dataset: SampleDataset) -> Tensor:
    """Find the depths that part all pixels of known depth into equal shares: (PARTS − 1,)."""
    depths = torch.cat([dataset[i].depth.as_subclass(Tensor).flatten() for i in range(len(dataset))])
    quantiles = np.quantile(depths[depths > 0].numpy(), np.arange(1, PARTS) / PARTS)
    return torch.from_numpy(quantiles).float()


def spoiled(sample: Sample, strength: float, index: int) -> Sample:
    """Add noise to depth, the same whichever network sees it."""
    random = torch.Generator().manual_seed(index)
    depth = noise(sample.depth.as_subclass(Tensor), relative=strength, random=random)
    return replace(sample, depth=depth)


def measure(net: nn.Module, dataset: SampleDataset, borders: Tensor) -> dict[str, list[float]]:
    """Score a network, mIoU in percent, under every noise, and without it in every bin."""
    found = {name: [Confusion(len(dataset.classes)) for _ in range(count)] for name, count in QUESTIONS.items()}
    for index in range(len(dataset)):
        sample = dataset[index]
        label = sample.label.as_subclass(Tensor)
        for strength, confusion in zip(NOISE, found["noise"], strict=True):
            predicted = probabilities(net, spoiled(sample, strength, index)).max(0).indices
            confusion.update(predicted, label)
            if strength == 0:
                for question, where in bins(sample, borders):
                    for number, inside in enumerate(found[question]):
                        inside.update(predicted, torch.where(where == number, label, IGNORE))
    return {name: [100 * confusion.miou for confusion in several] for name, several in found.items()}


def shown_bins(borders: Sequence[float]) -> dict[str, list[str]]:
    """Name, question by question, what is asked and every strength or bin."""
    ends = [f"{a:.3g}" for a in borders]
    return {
        "noise of depth, standard deviation": [f"{strength:.1%}" for strength in NOISE],
        "a fifth of the pixels each: metres": [
            f"to {ends[0]}", *(f"{a} … {b}" for a, b in itertools.pairwise(ends)), f"from {ends[-1]}"
        ],
        "farthest neighbour on the grid of res2, in cells": [
            *(f"{a:g} … {b:g}" for a, b in itertools.pairwise(STEPS)), f"from {STEPS[-1]:g}"
        ],
    }  # fmt: skip


def gains(scores: Mapping[str, Mapping[str, Sequence[float]]], first: str) -> dict[str, Array]:
    """Subtract the ``first`` row's scores with the same seed, and average: row → seed → (n,) becomes row → (n,)."""
    baseline = scores.get(first, {})
    paired = {
        name: [np.subtract(each, baseline[seed]) for seed, each in seeds.items() if seed in baseline]
        for name, seeds in scores.items()
    }
    return {name: np.mean(several, axis=0) for name, several in paired.items() if several}


@styled
def draw(rows: Sequence[Mapping[str, Any]], found: Found, borders: Sequence[float]) -> Figure:
    """Draw each row's mIoU above the first row's: by updates, noise, depth and steepness, means over seeds."""
    figure, panels = new_figure(11.5, 6.6, 2, 2)
    lines: dict[str, Any] = {}
    first = rows[0]["name"]
    curves = {row["name"]: {seed: run["curve"] for seed, run in row["runs"].items()} for row in rows}
    steps = [int(step) for step in next(iter(curves[first].values()))]
    scores = {name: {seed: [*curve.values()] for seed, curve in runs.items()} for name, runs in curves.items()}
    by_updates = gains(scores, first)
    asked = [
        gains({name: {seed: each[question] for seed, each in seeds.items()} for name, seeds in found.items()}, first)
        for question in QUESTIONS
    ]
    for number, name in enumerate(list(curves)[1:]):
        look: dict[str, Any] = {"color": LINES[number % len(LINES)], "linestyle": DASHES[number // len(LINES)]}
        (lines[name],) = panels[0, 0].plot(steps, by_updates[name], marker="o", markersize=4, **look)
        for panel, answers in zip(panels.flat[1:], asked, strict=True):
            if name in answers:
                panel.plot(range(len(answers[name])), answers[name], marker="o", markersize=4, **look)
    panels[0, 0].set_xlabel("updates")
    for panel, (label, names) in zip(panels.flat[1:], shown_bins(borders).items(), strict=True):
        panel.set_xticks(range(len(names)), names, fontsize=8.5)
        panel.set_xlabel(label)
    for panel in panels.flat:
        panel.axhline(0, color="black", linewidth=0.8)
    for row in panels:
        row[0].set_ylabel(f"mIoU above {first}")
    legend(figure, list(lines.values()), list(lines), width=3.0)
    return figure


def measure_all(plan: Plan, runs: Path, record: Path, dataset: SampleDataset, borders: Tensor) -> Found:
    """Measure the finished runs of ``plan`` in ``runs`` that when.json in ``record`` does not have yet."""
    kept = record / "when.json"
    found: Found = read_json(kept) if kept.exists() else {}
    finished = {(row["name"], seed) for row in read_json(record / "results.json")["rows"] for seed in row["runs"]}
    for run in plan.runs:
        seed = str(run.seed)
        if (run.row, seed) not in finished or seed in found.get(run.row, {}) or not (runs / run.folder).is_dir():
            continue
        found.setdefault(run.row, {})[seed] = measure(load_trained(str(runs / run.folder)).net, dataset, borders)
        write_whole(kept, (json.dumps(found, indent=1) + "\n").encode())
        print(f"{run}: measured", flush=True)
    return found


def main() -> None:
    torch.set_num_threads(1)
    plan = read_plan(Path(sys.argv[1]))
    data = plan.runs[0].config.data
    dataset = open_dataset(data.root, data.val)
    borders = depth_borders(dataset)
    runs = Path(sys.argv[2])
    record = runs if (runs / "results.json").exists() else Path(plan.record or plan.out)
    found = measure_all(plan, runs, record, dataset, borders)
    means = {
        name: {question: np.mean([each[question] for each in seeds.values()], axis=0) for question in QUESTIONS}
        for name, seeds in found.items()
    }
    for question, heading in zip(QUESTIONS, shown_bins(borders.tolist()).items(), strict=True):
        cells = [[heading[0], *heading[1]]]
        cells += [[name, *(f"{value:.1f}" for value in values[question])] for name, values in means.items()]
        print(markdown(cells))
    save(draw(full_rows(record), found, borders.tolist()), str(record / "when.png"), "png")


if __name__ == "__main__":
    main()
