"""Show the trained networks of a study the same kind of scenes through another camera.

    python studies/trained/other_camera.py studies/trained/rooms.yaml runs/trained_rooms

Reads the runs that `malleable study` left in the folder, evaluates each on the split `other-camera` of its world (a
wider and coarser view, depth from a small stereo camera instead of a Kinect), keeps what it found in other_camera.json
beside the study's results, and prints a table. What is in the file is not measured again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from malleable.data import open_dataset
from malleable.files import read_json, write_whole
from malleable.inference.evaluate import evaluate_network
from malleable.inference.load import load_trained
from malleable.reports.plan import read_plan
from malleable.reports.statistics import Average, shown
from malleable.reports.tables import markdown

Found = dict[str, dict[str, dict[str, float]]]
"""Row → seed → mIoU with its own and with the other camera, in percent."""


def measure(study: Path, runs: Path) -> Found:
    """Evaluate all runs that are finished and were not evaluated yet."""
    plan = read_plan(study)
    kept = Path(plan.record or plan.out) / "other_camera.json"
    found: Found = read_json(kept) if kept.exists() else {}
    results = read_json(kept.with_name("results.json"))
    own = {(row["name"], seed): run["miou"] for row in results["rows"] for seed, run in row["runs"].items()}
    for run in plan.runs:
        seed = str(run.seed)
        if (run.row, seed) not in own or seed in found.get(run.row, {}) or not (runs / run.folder).is_dir():
            continue
        trained = load_trained(str(runs / run.folder))
        other = open_dataset(run.config.data.root, "other-camera")
        scores = evaluate_network(trained.net, other, split="other-camera", progress=True)
        found.setdefault(run.row, {})[seed] = {"own": own[run.row, seed], "other": scores.miou}
        write_whole(kept, (json.dumps(found, indent=1) + "\n").encode())
    return found


def main() -> None:
    torch.set_num_threads(1)
    found = measure(Path(sys.argv[1]), Path(sys.argv[2]))
    cells = [["mIoU", "seeds", "its own camera", "another camera", "difference"]]
    for row, seeds in found.items():
        pairs = [(each["own"], each["other"]) for each in seeds.values()]
        averages = [Average.of(values) for values in zip(*pairs, strict=True)]
        change = Average.of(other - own for own, other in pairs)
        cells.append([row, str(len(pairs)), *map(shown, averages), shown(change, "+")])
    print(markdown(cells))


if __name__ == "__main__":
    main()
