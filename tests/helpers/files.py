"""What the tests of data sets on disk share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (12, 16)
CAMERA = {"width": 16, "height": 12, "fx": 20.0, "fy": 21.0, "cx": 7.0, "cy": 6.0}


def save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
