"""What the synthetic worlds share: random materials, objects made of parts, places that do not overlap."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from malleable.data.image_files import Array
from malleable.data.synthetic.render import PATTERNS, Material, Shape, Solid

Random = np.random.Generator

# Half plain or blotchy, half regular; in the order of PATTERNS.
_PATTERNS_UP_TO = np.cumsum([0.35, 0.13, 0.1, 0.2, 0.12])
assert len(_PATTERNS_UP_TO) == len(PATTERNS) - 1


def random_material(random: Random, scale: float = 1.0) -> Material:
    """Draw a material that tells nothing of the class: every class draws from the same colours and patterns."""
    first = _random_colour(random)
    second = _random_colour(random) if random.random() < 0.4 else first * random.uniform(0.55, 0.9)
    pattern = int(np.searchsorted(_PATTERNS_UP_TO, random.random()))
    u, v = scale * np.exp(random.uniform(np.log(0.12), np.log(0.9), 2))
    phase = random.random(2)
    return Material(first, second, pattern, (float(u), float(v)), (float(phase[0]), float(phase[1])))


def _random_colour(random: Random) -> Array:
    hue, saturation, value = random.random(), random.beta(1.3, 2.2), random.uniform(0.25, 0.95)
    return np.array(colorsys.hsv_to_rgb(hue, saturation, value))


@dataclass
class Thing:
    """Collects the parts of an object in its own frame (x across, y up from the floor, z to its back)."""

    at: tuple[float, float, float]  # where its frame's origin is in the world
    yaw: float
    label: int
    material: Material
    parts: list[Solid] = field(default_factory=list)

    def add(
        self,
        shape: Shape,
        center: Sequence[float],
        size: Sequence[float],
        material: Material | None = None,
        label: int | None = None,
    ) -> None:
        """Add a part of full ``size`` (x, y, z) around ``center``."""
        x, y, z = map(float, center)  # not NumPy's, which would turn every ray into float64
        c, s = math.cos(self.yaw), math.sin(self.yaw)
        at_x, at_y, at_z = map(float, self.at)
        world = (at_x + c * x + s * z, at_y + y, at_z - s * x + c * z)
        half = (float(size[0]) / 2, float(size[1]) / 2, float(size[2]) / 2)
        own = self.label if label is None else label
        self.parts.append(Solid(shape, world, half, self.yaw, own, self.material if material is None else material))

    def add_legs(self, width: float, depth: float, height: float, thick: float, shape: Shape) -> None:
        """Add four legs under a top of ``width`` × ``depth``."""
        for x in (-1, 1):
            for z in (-1, 1):
                center = (x * (width - thick) / 2, height / 2, z * (depth - thick) / 2)
                self.add(shape, center, (thick, height, thick))


class Floor:
    """Knows which rectangles of the floor, along the x and z axes, are taken."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float, float, float]] = []

    def take(self, x: float, z: float, width: float, depth: float) -> bool:
        """Take the rectangle of ``width`` (x) × ``depth`` (z) around (x, z) if it is free."""
        for other_x, other_z, other_width, other_depth in self._taken:
            if abs(x - other_x) < (width + other_width) / 2 and abs(z - other_z) < (depth + other_depth) / 2:
                return False
        self._taken.append((x, z, width, depth))
        return True
