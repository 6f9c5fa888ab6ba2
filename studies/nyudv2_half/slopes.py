"""How far along the depth axis do a pixel's neighbours lie? By class, on the grids of a ResNet.

    python studies/nyudv2_half/slopes.py data/nyudv2-half

Prints which part of the direct neighbours, above and below or left and right, differs from the pixel by more than 0.5,
1.5 and 3 grid cells. A malleable layer of three kernels that starts from centers −2 … 2 reaches to about 1.5, as 2.5D
does. Training images only.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import torch

from malleable import Geometry
from malleable.data import FolderDataset
from malleable.ops.window import Window
from malleable.progress import with_progress
from malleable.reports.tables import markdown

STRIDES = (4, 8, 16)  # of the maps that a ResNet's stages read
DIRECTIONS = {"above, below": (1, 7), "left, right": (3, 5)}  # taps of a 3×3 convolution
CLASSES = ("floor", "wall", "table", "bed")
LIMITS = (0.5, 1.5, 3.0)


def main(root: Path) -> None:
    dataset = FolderDataset(root, "train")
    names = list(dataset.classes)
    window = Window.of(3)  # no padding: every tap is inside the image
    beyond: dict[tuple[int, str, str], torch.Tensor] = defaultdict(lambda: torch.zeros(1 + len(LIMITS)))
    for sample in with_progress((dataset[place] for place in range(len(dataset))), len(dataset), "reading"):
        geometry = Geometry(sample.depth[None], sample.camera.focal)
        for stride in STRIDES:
            label = sample.label[::stride, ::stride]
            d, valid = geometry.relative_depth(window, label.shape)
            center = label[1:-1, 1:-1].expand(2, -1, -1)
            for direction, taps in DIRECTIONS.items():
                reach, known = d[0, list(taps)].abs(), valid[0, list(taps)]
                for name in ("all", *CLASSES):
                    own = reach[known if name == "all" else known & (center == names.index(name))]
                    counts = [own.numel(), *(int((own > limit).sum()) for limit in LIMITS)]
                    beyond[stride, name, direction] += torch.tensor(counts)
    table = [["class", "stride", *(f"{way}, > {limit:g}" for way in DIRECTIONS for limit in LIMITS)]]
    for stride in STRIDES:
        for name in ("all", *CLASSES):
            counts = [beyond[stride, name, direction] for direction in DIRECTIONS]
            table.append(
                [name, str(stride), *(f"{100 * part / count[0]:.0f} %" for count in counts for part in count[1:])]
            )
    print(markdown(table))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
