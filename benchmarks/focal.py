"""How much a wrong focal length changes what a layer gives: the table of docs/depth.md.

    python benchmarks/focal.py

Layers of 3 × 3, with random weights and the receptive field they start with, read smooth random features at a rate of 4
of rooms and streets, with the true focal length and with multiples of it. Printed is the mean absolute change of the
output, in percent of its mean absolute value. The last column is the change if all depth is unknown.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import malleable as mb

FACTORS = (0.5, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
SIZE, RATE, CHANNELS, SCENES = (120, 160), 4, 16, 12


def main() -> None:
    torch.manual_seed(0)
    layers = {kind.__name__: kind(CHANNELS, CHANNELS, 3, padding=1) for kind in (mb.MalleableConv2d, mb.Conv25d)}
    print("| focal length × |", " | ".join(f"{factor:g}" for factor in FACTORS), "| no depth |")
    print("|---|" + "---|" * (len(FACTORS) + 1))
    with torch.no_grad():
        for world in ("rooms", "streets"):
            samples = list(mb.data.SyntheticScenes(world, SIZE, seed=3, length=SCENES))  # type: ignore[arg-type]
            depth = torch.stack([sample.depth.as_subclass(Tensor) for sample in samples])
            focal = torch.tensor([sample.camera.focal for sample in samples])
            coarse = torch.randn(SCENES, CHANNELS, SIZE[0] // RATE // 3, SIZE[1] // RATE // 3)
            features = interpolate(coarse, size=(SIZE[0] // RATE, SIZE[1] // RATE), mode="bicubic")
            wrong = [mb.Geometry(depth, factor * focal) for factor in FACTORS]
            for name, layer in layers.items():
                true = layer(features, mb.Geometry(depth, focal))
                outputs = [layer(features, geometry) for geometry in (*wrong, mb.Geometry(0 * depth, focal))]
                cells = [f"{100 * (output - true).abs().mean() / true.abs().mean():.0f}" for output in outputs]
                print(f"| {world}, {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
