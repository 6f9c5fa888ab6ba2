"""Show the trained networks of a study the same kind of scenes through another camera.

    python studies/trained/other_camera.py studies/trained/rooms.yaml runs/trained_rooms

Reads the runs that `malleable study` left in the folder, evaluates each on the split `other-camera` of its world (a
wider and coarser view, depth from a small stereo camera instead of a Kinect), keeps what it found in other_camera.json
beside the study's results, and prints a table. What is in the file is not measured again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from again import measure_again, record
from torch import nn

from malleable.data import open_dataset
from malleable.files import read_json
from malleable.inference.evaluate import evaluate_network
from malleable.reports.plan import PlannedRun, read_plan
from malleable.reports.statistics import Average, shown
from malleable.reports.tables import markdown

SPLIT = "other-camera"


def main() -> None:
    torch.set_num_threads(1)
    plan = read_plan(Path(sys.argv[1]))
    rows = {row["name"]: row["runs"] for row in read_json(record(plan) / "results.json")["rows"]}

    def both(run: PlannedRun, net: nn.Module) -> dict[str, float]:
        """Give the mIoU with its own and with the other camera, in percent."""
        other = evaluate_network(net, open_dataset(run.config.data.root, SPLIT), split=SPLIT).miou
        return {"own": rows[run.row][str(run.seed)]["miou"], "other": other}

    cells = [["mIoU", "seeds", "its own camera", "another camera", "difference"]]
    for row, seeds in measure_again(plan, Path(sys.argv[2]), "other_camera.json", both).items():
        pairs = [(each["own"], each["other"]) for each in seeds.values()]
        averages = [Average.of(values) for values in zip(*pairs, strict=True)]
        change = Average.of(other - own for own, other in pairs)
        cells.append([row, str(len(pairs)), *map(shown, averages), shown(change, "+")])
    print(markdown(cells))


if __name__ == "__main__":
    main()
