"""Synthetic scenes: rooms and streets by a ray caster, each a pure function of the seed and its index."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch

from malleable.camera import Camera
from malleable.data.image_files import Array
from malleable.data.palette import default_palette
from malleable.data.sample import Sample, SampleDataset
from malleable.data.synthetic import rooms, streets
from malleable.data.synthetic.kept import Kept, Rendered
from malleable.data.synthetic.render import render
from malleable.data.synthetic.scene import Random
from malleable.data.synthetic.sensor import kinect, stereo

World = Literal["rooms", "streets"]
Sensor = Literal["kinect", "stereo", "perfect"]

SIZE = (120, 160)
_OWN: dict[World, Sensor] = {"rooms": "kinect", "streets": "stereo"}
_BASELINE = {"rooms": 0.055, "streets": 0.21}  # metres, of a camera held in the hand and of one on a car


class SyntheticScenes(SampleDataset):
    """Draws random layouts, textures and lights: ``"rooms"`` as a Kinect sees them, ``"streets"`` as a stereo rig.

    ``sensor`` measures depth instead: ``"kinect"``, ``"stereo"`` or ``"perfect"``, which knows all but the sky.
    ``zoom`` multiplies the focal length.

    All classes draw their colours from one distribution, but for road, sky, glass and tyres of streets, so colour alone
    does not give the class. Sample ``index`` depends on ``world``, ``size`` (height, width), ``seed`` and ``index``
    only: take another seed for a test set. ``keep`` keeps what was rendered, for all processes, in a file of the cache
    folder (``$MALLEABLE_CACHE``, else malleable/ in the user's): 150 MB for 1,000 samples of 120 × 160.

    Example:
        >>> import malleable as mb
        >>> sample = mb.data.SyntheticScenes("rooms", size=(48, 64))[0]
        >>> sample.image.shape, sample.depth.shape, sample.label.shape
        (torch.Size([3, 48, 64]), torch.Size([1, 48, 64]), torch.Size([48, 64]))
    """

    def __init__(
        self,
        world: World = "rooms",
        size: tuple[int, int] = SIZE,
        seed: int = 0,
        length: int = 1000,
        keep: bool = False,
        *,
        sensor: Sensor | None = None,
        zoom: float = 1.0,
    ) -> None:
        if world not in get_args(World):
            raise ValueError(f"world must be one of {', '.join(get_args(World))}, got {world!r}")
        if len(size) != 2 or min(size) < 8:
            raise ValueError(f"size must be (height, width), both at least 8, got {size}")
        if seed < 0 or length < 0:
            raise ValueError(f"seed and length must not be negative, got seed={seed}, length={length}")
        if sensor is not None and sensor not in get_args(Sensor):
            raise ValueError(f"sensor must be one of {', '.join(get_args(Sensor))}, or None, got {sensor!r}")
        if not 0 < zoom < math.inf:
            raise ValueError(f"zoom must be a positive factor of the focal length, got {zoom}")
        self.sensor: Sensor = sensor or _OWN[world]
        self.zoom = zoom
        self.world, self.size, self.seed, self.length = world, (size[0], size[1]), seed, length
        other = "" if self.size == SIZE else f"-{size[0]}x{size[1]}"  # scores of another size are not comparable
        self.name = f"synthetic-{world}{other}"
        self.classes = rooms.CLASSES if world == "rooms" else streets.CLASSES
        self.palette = default_palette(len(self.classes))
        self.ids = [f"{world}-{seed}-{index:06d}" for index in range(length)]
        self._kept = Kept(f"{world}-{seed}-{self.sensor}-{float(zoom)}", length, self.size) if keep else None

    def __getitem__(self, index: int) -> Sample:
        position = index + self.length if index < 0 else index
        if not 0 <= position < self.length:
            raise IndexError(f"index must be in 0..{self.length - 1}, got {index}")
        rendered = None if self._kept is None else self._kept.get(position)
        if rendered is None:
            rendered = self._render(position)
            if self._kept is not None:
                self._kept.put(position, rendered)
        image, depth, label, camera = rendered
        return Sample(image, depth, label.long(), camera, self.ids[position])

    def _render(self, position: int) -> Rendered:
        random = np.random.default_rng((self.seed, get_args(World).index(self.world), position))
        scene = (rooms if self.world == "rooms" else streets).layout(random, self.size, self.zoom)
        seen = render(scene)
        depth = self._measure(seen.depth, scene.view.focal, random)
        label = np.where(seen.label < 0, streets.SKY, seen.label) if self.world == "streets" else seen.label
        image = torch.from_numpy(_expose(seen.colour, random)).permute(2, 0, 1)
        cx, cy = scene.view.principal
        camera = Camera(scene.view.focal, scene.view.focal, cx, cy, self.size)
        return image, torch.from_numpy(depth)[None], torch.from_numpy(label).byte(), camera

    def _measure(self, depth: Array, focal: float, random: Random) -> Array:
        if self.sensor == "perfect":
            return np.where(np.isfinite(depth), depth, 0)
        if self.sensor == "kinect":
            return kinect(depth, focal, random)
        return stereo(depth, focal, self.size[1], random, _BASELINE[self.world])


def _expose(colour: Array, random: Random) -> Array:
    """Turn light (H, W, 3) of 0..1 into a small camera's uint8: exposure, white balance, gamma, noise."""
    balance = random.uniform(0.85, 1.15) * random.uniform(0.93, 1.07, 3)
    image = np.power((colour * balance).clip(0, 1), random.uniform(0.7, 1.1), dtype=np.float32)
    image += random.uniform(0.005, 0.025) * random.standard_normal(colour.shape, np.float32)
    pixels: Array = (255 * image.clip(0, 1) + 0.5).astype(np.uint8)
    return pixels
