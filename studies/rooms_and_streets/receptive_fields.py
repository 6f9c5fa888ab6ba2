"""Draw the receptive fields that malleable layers learned in rooms and in streets, and print how wide they are.

    python studies/rooms_and_streets/receptive_fields.py

Reads {rooms,streets}/results.json, which `malleable study studies/rooms_and_streets/{rooms,streets}.yaml` writes, and
writes assigning_functions.png, receptive_fields_rooms.png and receptive_fields_streets.png in figures.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import numpy as np
import torch

import malleable as mb
from malleable.data import open_dataset
from malleable.figures.curves import Assigning, assigning_functions
from malleable.figures.inspection import Seeing, assigning, forerunners, seeing_layers
from malleable.figures.run import METHODS, draw_fields
from malleable.figures.style import save
from malleable.files import read_json
from malleable.geometry import grid_unit
from malleable.reports.statistics import Average, shown
from malleable.reports.tables import markdown

HERE = Path(__file__).parent
DEPTH = {"rooms": 1.0, "streets": 20.0}  # metres, as in the paper's figures of NYUDv2 and Cityscapes
ROW = "malleable K=3"


@torch.no_grad()
def learned(numbers: dict[str, float]) -> list[Seeing]:
    """The malleable layers res2 … res5 with the parameters of one run."""
    found = seeing_layers(mb.deeplabv3plus("resnet18", 2, "malleable", 3, pretrained=False))
    for seeing in found:
        seeing.layer.centers.copy_(torch.tensor([numbers[f"{seeing.name}/center_{k}"] for k in range(5)]))
        seeing.layer.temperature = numbers[f"{seeing.name}/temperature"]
    return found


def functions(seeing: Seeing, reach: float = 4.0) -> Assigning:
    """Over relative differences from −reach to reach, in hundredths."""
    d, layer = np.arange(-100 * reach, 100 * reach + 1) / 100, seeing.layer
    return assigning(d, layer.centers.tolist(), layer.temperature.item())


def width(seeing: Seeing) -> float:
    """Grid cells over which the kernels together take more than half of a neighbour."""
    return float((functions(seeing, reach=10.0).g.sum(0) > 0.5).sum()) / 100


def main() -> None:
    table = [["", "stage", "width in grid cells", "temperature", "width in metres"]]
    first: dict[str, list[Seeing]] = {}
    for world, depth in DEPTH.items():
        rows = {row["name"]: row["runs"] for row in read_json(HERE / world / "results.json")["rows"]}
        seeds = [learned(run["receptive_field"]) for run in rows[ROW].values()]
        focal = open_dataset(world, "val")[0].camera.focal
        for stage in zip(*seeds, strict=True):
            cells = [width(seeing) for seeing in stage]
            cell = grid_unit(depth, focal, stage[0].rate, stage[0].layer.dilation)
            temperatures = shown(Average.of(seeing.layer.temperature.item() for seeing in stage))
            metres = f"{mean(cells) * cell:.2f} at {depth:g} m"
            table.append([world, stage[0].stage, shown(Average.of(cells)), temperatures, metres])
        first[world] = seeds[0]
        methods = {METHODS[kind]: layers for kind, layers in forerunners(seeds[0]).items()} | {"malleable": seeds[0]}
        save(draw_fields(methods, depth, focal), str(HERE / f"figures/receptive_fields_{world}.png"), "png")
    print(markdown(table))
    states = {
        f"{world}, {seeing.stage}": functions(seeing)
        for pair in list(zip(*first.values(), strict=True))[:2]  # res2 and res3: the others hardly move in so few steps
        for world, seeing in zip(first, pair, strict=True)
    }
    save(assigning_functions(states), str(HERE / "figures/assigning_functions.png"), "png")


if __name__ == "__main__":
    main()
