"""Draw what malleable layers learned in rooms and in streets, and print how wide they look.

    python docs/rooms_and_streets.py

Reads docs/studies/{rooms,streets}/results.json, which `malleable study configs/study/{rooms,streets}.yaml` writes, and
writes docs/images/assigned_rooms_streets.svg, receptive_fields_rooms.svg and receptive_fields_streets.svg.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch

import malleable as mb
from malleable.data import open_dataset
from malleable.data.images import read_json
from malleable.figures import Assigning, Field, assigning_functions, receptive_fields, save
from malleable.inspection import Seeing, assigning, fields_in_metres, forerunners, seeing_layers

DOCS = Path(__file__).parent
DEPTH = {"rooms": 1.0, "streets": 20.0}  # metres, as in the paper's figures of NYUDv2 and Cityscapes
ROW = "malleable K=3"


def learned(world: str) -> list[list[Seeing]]:
    """The malleable layers res2 … res5 of every seed."""
    rows = {row["name"]: row["runs"] for row in read_json(DOCS / "studies" / world / "results.json")["rows"]}
    return [layers(run["receptive_field"]) for run in rows[ROW].values()]


@torch.no_grad()
def layers(numbers: dict[str, float]) -> list[Seeing]:
    found = seeing_layers(mb.deeplabv3plus("resnet18", 2, "malleable", 3, pretrained=False))
    for seeing in found:
        name, layer = seeing.name, seeing.layer
        layer.centers.copy_(torch.tensor([numbers[f"{name}/center_{k}"] for k in range(5)]))
        layer.temperature = numbers[f"{name}/temperature"]
    return found


def state(seeing: Seeing) -> Assigning:
    d = np.linspace(-3.5, 3.5, 1401)
    centers, temperature = seeing.layer.centers.tolist(), seeing.layer.temperature.item()
    return Assigning(d, *assigning(d, centers, temperature), np.array(centers), temperature)


def width(seeing: Seeing) -> float:
    """Grid cells over which the kernels together take more than half of a neighbour."""
    found = state(seeing)
    return float((found.g.sum(0) > 0.5).mean() * (found.d[-1] - found.d[0]))


def table(worlds: dict[str, list[list[Seeing]]]) -> str:
    lines = ["| | stage | width in grid cells | temperature | metres a cell at its depth |", "|---|---|---:|---:|---:|"]
    for world, seeds in worlds.items():
        focal = open_dataset(world, "val")[0].camera.focal
        for stage in zip(*seeds, strict=True):
            widths, temperatures = [width(s) for s in stage], [s.layer.temperature.item() for s in stage]
            cell = DEPTH[world] * stage[0].rate * stage[0].layer.dilation[0] / focal
            lines.append(
                f"| {world} | {stage[0].stage} | {spread(widths)} | {spread(temperatures)} | "
                f"{cell:.2g} at {DEPTH[world]:g} m |"
            )
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def main() -> None:
    worlds = {world: learned(world) for world in DEPTH}
    print(table(worlds))
    states = {f"{world}, {seeing.stage}": state(seeing) for seeing_pair in zip(*(seeds[0] for seeds in worlds.values()), strict=True)
              for world, seeing in zip(worlds, seeing_pair, strict=True) if seeing.stage in ("res2", "res3")}  # fmt: skip
    save(assigning_functions(states), str(DOCS / "images/assigned_rooms_streets.svg"), "svg")
    for world, seeds in worlds.items():
        focal = open_dataset(world, "val")[0].camera.focal
        methods = {**{kind: s for kind, s in forerunners(seeds[0]).items()}, "malleable": seeds[0]}
        drawn = fields_in_metres(list(methods.values()), DEPTH[world], focal)
        fields = {name: {stage: Field(*field) for stage, field in stages.items()} for name, stages in zip(methods, drawn, strict=True)}  # fmt: skip
        figure = receptive_fields(fields, DEPTH[world], focal)
        save(figure, str(DOCS / f"images/receptive_fields_{world}.svg"), "svg")


if __name__ == "__main__":
    main()
