"""The world ``rooms``: furnished rooms seen by a Kinect-like camera."""

from __future__ import annotations

import numpy as np

from malleable.data.synthetic.render import Light, Scene, Solid, View
from malleable.data.synthetic.scene import Floor, Random, Thing, random_material

CLASSES = ("wall", "floor", "ceiling", "table", "chair", "sofa", "bed", "cabinet", "picture", "lamp", "object")
WALL, FLOOR, CEILING, TABLE, CHAIR, SOFA, BED, CABINET, PICTURE, LAMP, OBJECT = range(len(CLASSES))

# Focal length of a Kinect in image widths: 519 of 640 pixels.
FOCAL = 519 / 640


def layout(random: Random, size: tuple[int, int], zoom: float = 1.0) -> Scene:
    """Lay out a random room with furniture, a camera and a lamp."""
    width, length, height = random.uniform(3.2, 6.5), random.uniform(4.0, 7.5), random.uniform(2.3, 3.0)
    view = View(
        size,
        focal=zoom * FOCAL * size[1] * random.uniform(0.93, 1.07),
        position=(random.uniform(-0.25, 0.25) * width, random.uniform(1.0, 1.7), random.uniform(0.3, 1.0)),
        yaw=random.uniform(-0.6, 0.6),
        pitch=random.uniform(0.0, 0.4),
    )
    room = Solid(
        "box", (0, height / 2, length / 2), (width / 2, height / 2, length / 2), 0.0, (FLOOR, CEILING, WALL),
        (random_material(random), random_material(random, 2.0), random_material(random, 1.5)), inside=True,
    )  # fmt: skip
    solids = [room]
    floor = Floor()
    floor.take(view.position[0], view.position[2], 1.0, 1.2)
    for _ in range(random.integers(3, 7)):
        solids += _against_wall(random, floor, width, length)
    for _ in range(random.integers(2, 6)):
        solids += _free_standing(random, floor, width, length)
    for _ in range(random.integers(1, 5)):
        solids += _picture(random, width, length, height)
    if random.random() < 0.6:
        solids += _decal(random, width, length, height)
    lamp = (random.uniform(-0.3, 0.3) * width, height - 0.15, random.uniform(0.15, 0.75) * length)
    tint = np.array([1.0, random.uniform(0.85, 1.0), random.uniform(0.7, 1.0)])
    light = Light(lamp, tint * random.uniform(0.9, 1.3), random.uniform(0.35, 0.6))
    return Scene(view, solids, light, background=np.zeros(3))  # a room has no outside


def _against_wall(random: Random, floor: Floor, width: float, length: float) -> list[Solid]:
    kind = random.choice([TABLE, SOFA, BED, CABINET, CABINET])
    build, across, deep = {
        TABLE: (_table, random.uniform(0.9, 1.7), random.uniform(0.5, 0.8)),
        SOFA: (_sofa, random.uniform(1.3, 2.3), random.uniform(0.75, 1.0)),
        BED: (_bed, random.uniform(0.9, 1.8), random.uniform(1.8, 2.1)),
        CABINET: (_cabinet, random.uniform(0.5, 1.6), random.uniform(0.3, 0.6)),
    }[int(kind)]
    for _ in range(8):
        side = random.integers(3)  # back, left or right wall; the camera's back is to the fourth
        if side == 0:
            x, z, yaw = random.uniform(-0.5, 0.5) * (width - across), length - deep / 2, 0.0
            taken = floor.take(x, z, across, deep)
        else:
            sign = 1 if side == 1 else -1
            x, z, yaw = -sign * (width - deep) / 2, random.uniform(across / 2, length - across / 2), -sign * np.pi / 2
            taken = floor.take(x, z, deep, across)
        if taken:
            return build(random, (x, 0.0, z), float(yaw), across, deep)
    return []


def _free_standing(random: Random, floor: Floor, width: float, length: float) -> list[Solid]:
    for _ in range(8):
        x, z = random.uniform(-0.42, 0.42) * width, random.uniform(1.3, length - 0.4)
        kind = random.choice([TABLE, CHAIR, CHAIR, CHAIR, LAMP, OBJECT])
        yaw = random.uniform(-np.pi, np.pi)
        if kind == TABLE and floor.take(x, z, 1.5, 1.5):
            return _table(random, (x, 0.0, z), yaw, random.uniform(0.7, 1.2), random.uniform(0.6, 0.9))
        if kind == CHAIR and floor.take(x, z, 0.6, 0.6):
            return _chair(random, (x, 0.0, z), yaw)
        if kind == LAMP and floor.take(x, z, 0.4, 0.4):
            return _lamp(random, (x, 0.0, z), random.uniform(1.2, 1.7))
        if kind == OBJECT and floor.take(x, z, 0.5, 0.5):
            return _object(random, (x, 0.0, z), random.uniform(0.25, 0.6))
    return []


def _table(random: Random, at: tuple[float, float, float], yaw: float, across: float, deep: float) -> list[Solid]:
    thing = Thing(at, yaw, TABLE, random_material(random))
    height, thick = random.uniform(0.45, 0.8), random.uniform(0.03, 0.08)
    round_top = random.random() < 0.25
    thing.add("cylinder" if round_top else "box", (0, height - thick / 2, 0), (across, thick, deep))
    if round_top:
        thing.add("cylinder", (0, height / 2, 0), (0.12, height - thick, 0.12))
        thing.add("cylinder", (0, 0.02, 0), (0.5 * across, 0.04, 0.5 * deep))
    else:
        thing.add_legs(across, deep, height - thick, random.uniform(0.04, 0.09), "box")
    return thing.parts + _on_top(random, thing, height, across, deep)


def _on_top(random: Random, thing: Thing, height: float, across: float, deep: float) -> list[Solid]:
    solids: list[Solid] = []
    for slot in random.permutation(3)[: random.integers(0, 3)]:
        offset, c, s = (slot - 1) * across / 3.2, np.cos(thing.yaw), np.sin(thing.yaw)
        at = (thing.at[0] + c * offset, thing.at[1] + height, thing.at[2] - s * offset)
        small = min(0.35, 0.7 * deep, across / 3.5)
        solids += _lamp(random, at, 0.5) if random.random() < 0.25 else _object(random, at, small)
    return solids


def _chair(random: Random, at: tuple[float, float, float], yaw: float) -> list[Solid]:
    thing = Thing(at, yaw, CHAIR, random_material(random))
    side, seat, back = random.uniform(0.4, 0.5), random.uniform(0.42, 0.5), random.uniform(0.4, 0.6)
    cover = random_material(random) if random.random() < 0.5 else None
    thing.add("box", (0, seat, 0), (side, random.uniform(0.04, 0.1), side), cover)
    thing.add("box", (0, seat + back / 2, side / 2 - 0.02), (side, back, 0.05), cover)
    if random.random() < 0.3:
        thing.add("cylinder", (0, seat / 2, 0), (0.07, seat, 0.07))
        thing.add("cylinder", (0, 0.03, 0), (side, 0.05, side))
    else:
        thing.add_legs(side, side, seat, 0.045, "cylinder" if random.random() < 0.5 else "box")
    return thing.parts


def _sofa(random: Random, at: tuple[float, float, float], yaw: float, across: float, deep: float) -> list[Solid]:
    thing = Thing(at, yaw, SOFA, random_material(random))
    seat, back, arm = random.uniform(0.36, 0.46), random.uniform(0.7, 0.95), random.uniform(0.12, 0.22)
    thing.add("box", (0, seat / 2, 0), (across, seat, deep))
    thing.add("box", (0, back / 2, deep / 2 - 0.1), (across, back, 0.2))
    for x in (-1, 1):
        thing.add("box", (x * (across - arm) / 2, (seat + 0.2) / 2, 0), (arm, seat + 0.2, deep))
    for x in (-1, 1) if random.random() < 0.6 else ():
        cushion = (x * across * 0.24, seat + 0.2, deep / 2 - 0.28)
        thing.add("ellipsoid", cushion, (0.45, 0.42, 0.24), random_material(random, 0.6))
    return thing.parts


def _bed(random: Random, at: tuple[float, float, float], yaw: float, across: float, deep: float) -> list[Solid]:
    thing = Thing(at, yaw, BED, random_material(random))
    frame, mattress = random.uniform(0.2, 0.35), random.uniform(0.15, 0.25)
    thing.add("box", (0, frame / 2, 0), (across, frame, deep))
    thing.add("box", (0, frame + mattress / 2, 0), (across * 0.96, mattress, deep * 0.97), random_material(random))
    thing.add("box", (0, 0.5, deep / 2 - 0.04), (across, random.uniform(0.8, 1.1), 0.07))
    pillow = random_material(random, 0.6)
    for side in (-0.25, 0.25) if across > 1.2 else (0.0,):
        thing.add("ellipsoid", (side * across, frame + mattress + 0.05, deep / 2 - 0.35), (0.6, 0.2, 0.4), pillow)
    return thing.parts


def _cabinet(random: Random, at: tuple[float, float, float], yaw: float, across: float, deep: float) -> list[Solid]:
    thing = Thing(at, yaw, CABINET, random_material(random))
    height = random.uniform(0.6, 1.1) if random.random() < 0.5 else random.uniform(1.5, 2.1)
    if random.random() < 0.35:  # open shelves with things in them
        board = 0.04
        thing.add("box", (0, height / 2, deep / 2 - board / 2), (across, height, board))
        for x in (-1, 1):
            thing.add("box", (x * (across - board) / 2, height / 2, 0), (board, height, deep))
        for y in np.linspace(board / 2, height - board / 2, int(height / 0.4) + 1):
            thing.add("box", (0, float(y), 0), (across, board, deep))
        return thing.parts
    thing.add("box", (0, height / 2, 0), (across, height, deep))
    doors = max(1, round(across / 0.5))
    front = random_material(random) if random.random() < 0.4 else None
    for door in range(doors):
        middle = (door + 0.5) / doors * across - across / 2
        thing.add("box", (middle, height / 2, -deep / 2), (across / doors - 0.04, height - 0.08, 0.03), front)
    return thing.parts + (_on_top(random, thing, height, across, deep) if height < 1.2 else [])


def _lamp(random: Random, at: tuple[float, float, float], height: float) -> list[Solid]:
    thing = Thing(at, 0.0, LAMP, random_material(random))
    wide = random.uniform(0.25, 0.4) * (1.0 if height > 1 else 0.8)
    thing.add("cylinder", (0, 0.015, 0), (0.8 * wide, 0.03, 0.8 * wide))
    thing.add("cylinder", (0, height * 0.4, 0), (0.035, height * 0.8, 0.035))
    shape = random.choice(["cylinder", "ellipsoid"])
    thing.add(shape, (0, height * 0.85, 0), (wide, 0.28, wide), random_material(random, 0.5))
    return thing.parts


def _object(random: Random, at: tuple[float, float, float], size: float) -> list[Solid]:
    thing = Thing(at, random.uniform(-0.8, 0.8), OBJECT, random_material(random, 0.5))
    x, y, z = size * random.uniform(0.5, 1.0, 3)
    shape = random.choice(["box", "box", "ellipsoid", "cylinder"])
    thing.add(shape, (0, y / 2, 0), (x, y, z if shape == "box" else x))
    return thing.parts


def _on_wall(random: Random, width: float, length: float, across: float) -> tuple[tuple[float, float], float]:
    """Choose a place (x, z) on the back, left or right wall and the yaw of a thing that hangs there."""
    side = random.integers(3)
    if side == 0:
        return (random.uniform(-0.5, 0.5) * (width - across), length), 0.0
    z = random.uniform(across / 2 + 1, length - across / 2)
    return ((-width / 2, z), -np.pi / 2) if side == 1 else ((width / 2, z), np.pi / 2)


def _picture(random: Random, width: float, length: float, height: float) -> list[Solid]:
    across, tall = random.uniform(0.35, 1.1), random.uniform(0.3, 0.8)
    (x, z), yaw = _on_wall(random, width, length, across)
    thing = Thing((x, random.uniform(1.3, height - 0.7), z), yaw, PICTURE, random_material(random, 0.6))
    thing.add("box", (0, 0, 0), (across, tall, 0.06))
    thing.add("box", (0, 0, -0.01), (0.85 * across, 0.8 * tall, 0.07), random_material(random, 0.5))
    return thing.parts


def _decal(random: Random, width: float, length: float, height: float) -> list[Solid]:
    """Paint a patch on a wall or lay a flat rug: it looks like a thing of its own, but is part of wall or floor."""
    if random.random() < 0.5:
        rug = Thing((random.uniform(-0.2, 0.2) * width, 0.0, 0.6 * length), 0.0, FLOOR, random_material(random))
        rug.add("box", (0, 0.002, 0), (random.uniform(1.2, 2.4), 0.006, random.uniform(1.0, 2.0)))
        return rug.parts
    across = random.uniform(0.5, 1.3)
    (x, z), yaw = _on_wall(random, width, length, across)
    patch = Thing((x, random.uniform(0.8, height - 0.6), z), yaw, WALL, random_material(random))
    patch.add("box", (0, 0, 0), (across, random.uniform(0.5, 1.2), 0.006))
    return patch.parts
