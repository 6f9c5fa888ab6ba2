"""Score exported networks in ONNX Runtime: ``python benchmarks/onnx_scores.py rooms model.onnx int8.onnx``.

The first argument is the data: a folder with dataset.json, or "rooms" or "streets" for synthetic scenes. All models see
the same images of its validation split, each at its own size.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import onnxruntime
import torch

from malleable.data.open import open_dataset
from malleable.inference.confusion import Confusion
from malleable.reports.tables import print_cells

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from int8 import Inputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--split", default="val")
    arguments = parser.parse_args()
    data = open_dataset(arguments.data, arguments.split)
    cells = [["model", "mIoU", "pixel accuracy"]]
    for model in arguments.models:
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        confusion, inputs = Confusion(len(data.classes)), Inputs(model, (data[i] for i in range(len(data))))
        for i in range(len(data)):
            (logits,) = session.run(None, inputs.get_next())
            confusion.update(torch.from_numpy(logits[0].argmax(0)), data[i].label)
        cells.append([model.name, f"{100 * confusion.miou:.2f}", f"{100 * confusion.pixel_accuracy:.2f}"])
    print_cells(cells, f"{arguments.data}, {arguments.split}, {len(data)} images")


if __name__ == "__main__":
    main()
