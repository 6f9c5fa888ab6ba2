"""Show what filling holes and smoothing depth are worth: trained networks of a study, with the switches off and on.

    python studies/trained/switches.py studies/trained/rooms.yaml runs/trained_rooms

Reads the runs that `malleable study` left in the folder and prints a table; networks that see depth count.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from malleable.data import open_dataset
from malleable.data.faults import chosen_stresses
from malleable.inference.evaluate import evaluate_network
from malleable.inference.load import load_trained
from malleable.inference.stress import stress_network
from malleable.models.convert import Converted
from malleable.models.depth_input import DepthEncoder
from malleable.reports.plan import read_plan
from malleable.reports.tables import markdown
from malleable.runs.scores import RESULTS, Protocol

FAULTS = [
    "25% unknown", "50% unknown", "90% unknown", "50% scattered", "95% scattered", "noise of 2 %",
    "noise of 2 %, 4 pixels wide",
]  # fmt: skip
SWITCHES = {  # fill_depth and smooth_depth
    "as it is": (False, 0),
    "filled": (True, 0),
    "filled, smoothed once": (True, 1),
    "filled, smoothed twice": (True, 2),
}


def main() -> None:
    torch.set_num_threads(1)
    study, runs = Path(sys.argv[1]), Path(sys.argv[2])
    faults = chosen_stresses(FAULTS)
    cells = [["mIoU", "depth", "no fault", *(fault.name for fault in faults)]]
    for run in read_plan(study).runs:
        data, model = run.config.data, run.config.model
        if not model.sees_depth or not (runs / run.folder / RESULTS).is_file():
            continue
        net = load_trained(str(runs / run.folder)).net
        dataset = open_dataset(data.root, data.val)
        for name, switches in SWITCHES.items():
            for module in net.modules():
                if isinstance(module, Converted | DepthEncoder):
                    module.fill_depth, module.smooth_depth = switches
            own = evaluate_network(net, dataset, split=data.val).miou
            found = stress_network(net, dataset, Protocol(), own, faults, split=data.val)
            numbers = [f"{value:.1f}" for value in (own, *found.values())]
            cells.append([f"{run.row}, seed {run.seed}", name, *numbers])
    print(markdown(cells))


if __name__ == "__main__":
    main()
