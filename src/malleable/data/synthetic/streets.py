"""The world ``streets``: a street between houses, seen from a car with a stereo camera."""

from __future__ import annotations

import numpy as np

from malleable.data.image_files import Array
from malleable.data.synthetic.render import Light, Material, Scene, Solid, View
from malleable.data.synthetic.scene import Floor, Random, Thing, random_material

CLASSES = ("road", "sidewalk", "building", "wall", "pole", "sign", "vegetation", "person", "car", "sky")
ROAD, SIDEWALK, BUILDING, WALL, POLE, SIGN, VEGETATION, PERSON, CAR, SKY = range(len(CLASSES))

# Focal length of the Cityscapes rigs in image widths: 2262 of 2048 pixels.
FOCAL = 2262 / 2048
FARTHEST = 150.0
KERB = 0.15


def layout(random: Random, size: tuple[int, int], zoom: float = 1.0) -> Scene:
    """Lay out a random street along the z axis."""
    road, walk = random.uniform(6.0, 11.0), random.uniform(1.8, 4.5)
    view = View(
        size,
        focal=zoom * FOCAL * size[1] * random.uniform(0.8, 1.05),
        position=(random.uniform(-0.3, 0.3) * road, random.uniform(1.2, 1.8), 0.0),
        yaw=random.uniform(-0.2, 0.2),
        pitch=random.uniform(-0.04, 0.08),
    )
    solids = _ground(random, road, walk)
    floor = Floor()
    for side in (-1, 1):
        solids += _houses(random, side, road / 2 + walk)
        solids += _beside(random, floor, side, road / 2, walk)
        for _ in range(random.integers(1, 7)):
            solids += _car(random, floor, (side * (road / 2 - 1.1), 0.0, random.uniform(6, 70)))
    for _ in range(random.integers(0, 4)):
        solids += _car(random, floor, (random.uniform(-0.2, 0.2) * road, 0.0, random.uniform(9, 90)))
    for _ in range(random.integers(1, 7)):
        x, z = random.uniform(-1, 1) * (road / 2 + walk), random.uniform(4, 35)
        solids += _person(random, floor, (x, KERB if abs(x) > road / 2 else 0.0, z))
    height, turn = random.uniform(0.35, 1.2), random.uniform(0, 2 * np.pi)
    away = 1000 * np.array([np.cos(height) * np.sin(turn), np.sin(height), np.cos(height) * np.cos(turn)])
    tint = np.array([1.0, random.uniform(0.88, 1.0), random.uniform(0.75, 1.0)])
    sun = Light((away[0], away[1], away[2]), tint * random.uniform(0.9, 1.4), random.uniform(0.4, 0.7))
    return Scene(view, solids, sun, _sky(random, view), haze=random.uniform(90, 500))


def _sky(random: Random, view: View) -> Array:
    """Paint the sky, (H, W, 3), from a bright horizon to a darker, bluer zenith, with clouds."""
    x, y, z = view.rays()
    up = (y / np.sqrt(x * x + y * y + z * z)).clip(0, 1)
    blue, bright = random.uniform(0, 0.35), random.uniform(0.6, 1.0)
    horizon = np.array([bright, 0.99 * bright, 0.97 * bright], np.float32)
    zenith = np.array([bright * (1 - 1.6 * blue), bright * (1 - 0.8 * blue), bright], np.float32)
    a, b, c = random.uniform(0, 2 * np.pi, 3)
    far_x, far_z = x / (up + 0.12), z / (up + 0.12)
    cloud = np.sin(1.3 * far_x + a + 1.5 * np.sin(0.9 * far_z + b)) * np.sin(1.1 * far_z + c + np.sin(1.7 * far_x))
    rise = np.sqrt(up)[..., None]
    cover = 0.5 * cloud.clip(0, 1)[..., None] * random.random()
    sky: Array = (horizon * (1 - rise) + zenith * rise) * (1 - cover) + bright * cover
    return sky


def _ground(random: Random, road: float, walk: float) -> list[Solid]:
    """Lay grass far and wide, the road with its marks, and a sidewalk on each side."""
    grey = random.uniform(0.2, 0.5) * np.ones(3)
    asphalt = Material(grey, grey * random.uniform(0.8, 1.1), 3, (3.0, 7.0), (0.0, random.random()))
    thing = Thing((0.0, 0.0, FARTHEST / 2), 0.0, ROAD, asphalt)
    length = FARTHEST + 20
    thing.add("box", (0, -1.02, 0), (2 * FARTHEST, 2, length), random_material(random, 6.0), VEGETATION)
    thing.add("box", (0, -1, 0), (road, 2, length))
    paving = random_material(random)
    for side in (-1, 1):
        thing.add("box", (side * (road + walk) / 2, KERB - 1, 0), (walk, 2, length), paving, SIDEWALK)
    paint = _plain(0.9)
    if random.random() < 0.7:
        for z in np.arange(random.uniform(-75, -70), 0, 6):
            thing.add("box", (0, -0.01, float(z)), (0.14, 0.03, 3.0), paint)
    return thing.parts


def _plain(grey: float) -> Material:
    return Material(np.full(3, grey), np.full(3, grey), 0, (1.0, 1.0), (0.0, 0.0))


def _houses(random: Random, side: int, edge: float) -> list[Solid]:
    """Build a row of houses from near to far, with gaps closed by garden walls and trees."""
    solids: list[Solid] = []
    z = random.uniform(-6, 2)
    while z < FARTHEST:
        along, deep = random.uniform(6, 22) * (1 + z / 100), random.uniform(6, 14)
        setback = random.choice([0.0, random.uniform(1, 6)])
        x = side * (edge + setback + deep / 2)
        if random.random() < 0.75:
            tall = random.uniform(3.5, 7) if random.random() < 0.4 else random.uniform(7, 22)
            thing = Thing((x, 0.0, z + along / 2), 0.0, BUILDING, random_material(random, 5.0))
            thing.add("box", (0, tall / 2, 0), (deep, tall, along))
            front = -side * deep / 2
            if z < 50 and random.random() < 0.6:  # a plinth of another colour, and balconies or bays above it
                thing.add("box", (front, 1.2, 0), (0.3, 2.4, along), random_material(random, 3.0))
            for floor in range(1, int(tall / 3)) if z < 30 and random.random() < 0.6 else ():
                thing.add("box", (front, 3.0 * floor + 0.5, 0), (random.uniform(0.5, 1.6), 1.0, 0.6 * along))
            solids += thing.parts
        if setback or not solids or random.random() < 0.5:
            wall = Thing((side * (edge + 0.15), 0.0, z + along / 2), 0.0, WALL, random_material(random, 2.0))
            tall = random.uniform(0.8, 2.2)
            wall.add("box", (0, tall / 2, 0), (0.3, tall, along))
            solids += wall.parts
        z += along + random.choice([0.0, random.uniform(1, 8)])
    return solids


def _beside(random: Random, floor: Floor, side: int, edge: float, walk: float) -> list[Solid]:
    """Put trees, hedges, poles and signs on a sidewalk."""
    solids: list[Solid] = []
    for _ in range(random.integers(4, 12)):
        # More of them near: what is far is a pixel wide.
        z, x = 5 + 85 * random.random() ** 1.6, side * (edge + random.uniform(0.3, max(0.4, walk - 0.4)))
        if not floor.take(x, z, 0.8, 0.8):
            continue
        at = (x, KERB, z)
        kind = random.choice([VEGETATION, VEGETATION, POLE, SIGN, SIGN])
        solids += {VEGETATION: _plant, POLE: _pole, SIGN: _sign}[int(kind)](random, at)
    return solids


def _plant(random: Random, at: tuple[float, float, float]) -> list[Solid]:
    thing = Thing(at, random.uniform(-3, 3), VEGETATION, random_material(random, 0.8))
    if random.random() < 0.3:
        wide, tall = random.uniform(0.8, 1.6), random.uniform(0.6, 1.4)
        thing.add("ellipsoid", (0, tall / 2, 0), (wide, tall, wide))
        return thing.parts
    trunk, crown = random.uniform(1.6, 3.2), random.uniform(1.8, 3.6)
    thick = random.uniform(0.15, 0.4)
    thing.add("cylinder", (0, trunk / 2, 0), (thick, trunk + 0.6, thick), random_material(random))
    for _ in range(random.integers(2, 5)):
        x, y, z = random.uniform(-0.3, 0.3, 3) * crown
        wide = crown * random.uniform(0.6, 0.9)
        thing.add("ellipsoid", (x, trunk + crown / 2 + y, z), (wide, crown * random.uniform(0.6, 0.9), wide))
    return thing.parts


def _pole(random: Random, at: tuple[float, float, float]) -> list[Solid]:
    thing = Thing(at, float(random.choice([0.0, np.pi])), POLE, random_material(random))
    tall, thick = random.uniform(3.5, 7.5), random.uniform(0.1, 0.24)
    thing.add("cylinder", (0, tall / 2, 0), (thick, tall, thick))
    if random.random() < 0.6:
        thing.add("box", (0.6, tall, 0), (1.3, 0.1, 0.1))
        thing.add("ellipsoid", (1.2, tall - 0.05, 0), (0.6, 0.2, 0.3))
    return thing.parts


def _sign(random: Random, at: tuple[float, float, float]) -> list[Solid]:
    thing = Thing(at, random.uniform(-0.35, 0.35), SIGN, random_material(random, 0.4))
    tall, wide = random.uniform(2.0, 3.2), random.uniform(0.5, 1.0)
    thing.add("cylinder", (0, tall / 2, 0), (0.09, tall, 0.09), random_material(random), POLE)
    thing.add("box", (0, tall, -0.07), (wide, random.uniform(0.5, 1.0), 0.05))
    return thing.parts


def _person(random: Random, floor: Floor, at: tuple[float, float, float]) -> list[Solid]:
    if not floor.take(at[0], at[2], 0.7, 0.7):
        return []
    thing = Thing(at, random.uniform(-np.pi, np.pi), PERSON, random_material(random, 0.4))
    tall, stride = random.uniform(1.45, 1.95), random.uniform(0.0, 0.2)
    legs, hip = random_material(random, 0.4), 0.5 * tall
    for x in (-1, 1):
        thing.add("cylinder", (x * 0.1, hip / 2, x * stride), (0.17, hip, 0.19), legs)
        thing.add("ellipsoid", (x * 0.26, 0.66 * tall, -x * stride / 2), (0.14, 0.42 * tall, 0.16))
    thing.add("ellipsoid", (0, 0.68 * tall, 0), (0.48, 0.46 * tall, 0.3))
    thing.add("ellipsoid", (0, 0.935 * tall, 0), (0.2, 0.26, 0.22), random_material(random, 0.4))
    return thing.parts


def _car(random: Random, floor: Floor, at: tuple[float, float, float]) -> list[Solid]:
    wide, long = random.uniform(1.65, 1.9), random.uniform(3.6, 5.0)
    if not floor.take(at[0], at[2], wide + 0.3, long + 1.0):
        return []
    thing = Thing(at, float(random.choice([0.0, np.pi])) + random.uniform(-0.06, 0.06), CAR, random_material(random))
    low, belt, tall = 0.25, random.uniform(0.8, 1.0), random.uniform(1.35, 1.9)
    glass = _plain(random.uniform(0.05, 0.25))
    thing.add("box", (0, (low + belt) / 2, 0), (wide, belt - low, long))
    shift, cabin = random.uniform(-0.25, 0.1), random.uniform(0.45, 0.75) * long
    thing.add("box", (0, (belt + tall) / 2, shift), (0.86 * wide, tall - belt, cabin), glass)
    thing.add("box", (0, tall, shift), (0.84 * wide, 0.06, 0.92 * cabin))
    tyre = _plain(0.08)
    for x in (-1, 1) if at[2] < 30 else ():
        for z in (-1, 1):
            thing.add("ellipsoid", (x * (wide / 2 - 0.08), 0.32, z * 0.31 * long), (0.26, 0.64, 0.64), tyre)
    return thing.parts
