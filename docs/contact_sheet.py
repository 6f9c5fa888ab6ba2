"""Draw docs/images/synthetic.png: image, depth and label of scenes from both synthetic worlds.

python docs/contact_sheet.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from malleable.data import Sample, SyntheticScenes

RANGE = {"rooms": (0.5, 8.0), "streets": (3.0, 150.0)}  # metres, near and far end of the colours
ROWS, PER_ROW, SIZE, FRAME = 3, 2, (150, 200), ((0, 4), (0, 4), (0, 0))


def depth_colours(depth: np.ndarray, near: float, far: float) -> np.ndarray:
    """Near is red, far is blue, on a logarithmic scale; unknown is black."""
    share = np.log(np.maximum(depth, near) / near) / np.log(far / near)
    peaks = np.array([0.0, 0.45, 0.9])
    colours = 1.3 - 2.6 * np.abs(share.clip(0, 1)[..., None] - peaks)
    return (255 * colours.clip(0, 1) * (depth > 0)[..., None]).astype(np.uint8)


def strip(sample: Sample, palette: np.ndarray, world: str) -> np.ndarray:
    image = sample.image.permute(1, 2, 0).numpy()
    return np.concatenate([image, depth_colours(sample.depth[0].numpy(), *RANGE[world]), palette[sample.label]], axis=1)


def main() -> None:
    rows = []
    for world in ("rooms", "streets"):
        scenes = SyntheticScenes(world, size=SIZE, seed=5)
        palette = np.array(scenes.palette, np.uint8)
        for row in range(ROWS):
            strips = [strip(scenes[row * PER_ROW + column], palette, world) for column in range(PER_ROW)]
            rows.append(np.concatenate([np.pad(s, FRAME, constant_values=255) for s in strips], axis=1))
    sheet = Image.fromarray(np.concatenate(rows))
    path = Path(__file__).parent / "images" / "synthetic.png"
    path.parent.mkdir(exist_ok=True)
    sheet.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
