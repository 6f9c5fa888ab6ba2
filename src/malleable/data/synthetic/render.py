"""A small ray caster: boxes, ellipsoids and upright cylinders with procedural textures, one light and its shadows.

World axes: x right, y up, z ahead of an unturned camera, in metres. Arrays are float32, images (H, W).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from malleable.data.image_files import Array

Shape = Literal["box", "ellipsoid", "cylinder"]

_NEAR = 0.05
_CORNERS = np.array(np.meshgrid(*[(-1.0, 1.0)] * 3)).reshape(3, 8)


class Material(NamedTuple):
    """Mixes two colours (red, green, blue of 0..1) by a pattern of ``period`` metres along each face."""

    first: Array
    second: Array
    pattern: int  # index into PATTERNS
    period: tuple[float, float]
    phase: tuple[float, float]


PATTERNS = ("plain", "stripes", "checks", "blotches", "tiles", "bands")


class Solid(NamedTuple):
    """Fills the box of half sizes ``half`` around ``center`` with a shape, turned by ``yaw`` about the y axis.

    ``label`` is a class, or for an ``inside`` box (a room seen from within) those of its floor, ceiling and walls.
    """

    shape: Shape
    center: tuple[float, float, float]
    half: tuple[float, float, float]
    yaw: float
    label: int | tuple[int, int, int]
    material: Material | tuple[Material, Material, Material]
    inside: bool = False


class Patch(NamedTuple):
    """Says which rows and columns can show solid number ``solid``, and the least depth that it can have."""

    solid: int
    nearest: float
    part: tuple[slice, slice]

    @property
    def area(self) -> int:
        rows, columns = self.part
        return int((rows.stop - rows.start) * (columns.stop - columns.start))


@dataclass
class View:
    """Places a pinhole camera in the world. ``pitch`` looks down when positive; angles are in radians."""

    size: tuple[int, int]
    focal: float
    position: tuple[float, float, float]
    yaw: float
    pitch: float
    rotation: Array = field(init=False)  # (3, 3), camera (x right, y up, z ahead) to world

    def __post_init__(self) -> None:
        cy, sy, cp, sp = np.cos(self.yaw), np.sin(self.yaw), np.cos(self.pitch), np.sin(self.pitch)
        turn = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
        tilt = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
        self.rotation = turn @ tilt

    @property
    def principal(self) -> tuple[float, float]:
        """Give (cx, cy), the middle of the image."""
        return (self.size[1] - 1) / 2, (self.size[0] - 1) / 2

    def rays(self) -> Array:
        """Give world directions (3, H, W), 1 along the camera's axis, so that a ray's parameter is its depth."""
        height, width = self.size
        cx, cy = self.principal
        x = np.broadcast_to((np.arange(width) - cx) / self.focal, (height, width))
        y = np.broadcast_to(-(np.arange(height)[:, None] - cy) / self.focal, (height, width))
        camera = np.stack([x, y, np.ones((height, width))])
        return np.tensordot(self.rotation, camera, axes=1).astype(np.float32)

    def patches(self, solids: list[Solid]) -> list[Patch]:
        """Find where each solid that is not out of sight can show, the nearest first."""
        half = np.array([solid.half for solid in solids])[:, :, None]
        offset = np.array([solid.center for solid in solids]) - np.array(self.position)
        yaw = np.array([solid.yaw for solid in solids])[:, None]
        x, y, z = (half * _CORNERS).transpose(1, 0, 2)  # (solids, 8) each
        c, s = np.cos(yaw), np.sin(yaw)
        world = np.stack([c * x + s * z, y, -s * x + c * z]) + offset.T[:, :, None]
        x, y, z = np.tensordot(self.rotation.T, world, axes=1)
        cx, cy = self.principal
        safe = np.maximum(z, _NEAR)
        columns, rows = cx + self.focal * x / safe, cy - self.focal * y / safe
        beside = z.min(axis=1) < _NEAR  # partly behind the camera: its corners say nothing about where it shows
        height, width = self.size
        top, left = (np.where(beside, 0, v.min(axis=1).clip(0, None)).astype(int) for v in (rows, columns))
        bottom = np.where(beside, height, (rows.max(axis=1) + 2).clip(0, height)).astype(int)
        right = np.where(beside, width, (columns.max(axis=1) + 2).clip(0, width)).astype(int)
        seen = (z.max(axis=1) >= _NEAR) & (top < bottom) & (left < right)
        nearest = z.min(axis=1)
        order = np.argsort(nearest)
        numbers = np.stack([order, *(v[order] for v in (seen, top, bottom, left, right))], axis=1).tolist()
        return [
            Patch(i, near, (slice(y0, y1), slice(x0, x1)))
            for (i, shows, y0, y1, x0, x1), near in zip(numbers, nearest[order].tolist(), strict=True)
            if shows
        ]


class Rendering(NamedTuple):
    """Holds colour (H, W, 3) of 0..1, depth (H, W) in metres, inf for the background, and label (H, W), −1 there."""

    colour: Array
    depth: Array
    label: Array


class Light(NamedTuple):
    """Shines from ``position``, which may be very far. ``ambient`` light of 0..1 comes from everywhere."""

    position: tuple[float, float, float]
    colour: Array
    ambient: float


class Scene(NamedTuple):
    """Holds all there is to see. ``background`` (3,) or (H, W, 3) shows between solids, and through ``haze``."""

    view: View
    solids: list[Solid]
    light: Light
    background: Array
    haze: float = np.inf  # metres after which 1/e of a solid's colour is left


def render(scene: Scene) -> Rendering:
    """Render the scene as its view shows it, without the flaws of any sensor."""
    view, solids = scene.view, scene.solids
    patches = view.patches(solids)
    eye = np.array(view.position, np.float32)
    rays = view.rays()
    depth = np.full(view.size, np.inf, np.float32)
    index = np.full(view.size, -1, np.int32)
    for number, nearest, part in patches:
        solid, hidden_beyond = solids[number], depth[part]
        if nearest > hidden_beyond.max():
            continue
        enter, leave = _intersect(solid, eye, rays[:, part[0], part[1]])
        t = leave if solid.inside else enter
        nearer = (enter < leave) & (t > _NEAR) & (t < hidden_beyond)
        hidden_beyond[nearer] = t[nearer]
        index[part][nearer] = number
    seen = index >= 0
    colour = np.broadcast_to(scene.background, (*view.size, 3)).astype(np.float32)
    label = np.full(view.size, -1, np.int64)
    if seen.any():
        point = eye[:, None, None] + rays * np.where(seen, depth, 0)
        surface = _Surface(solids, np.where(seen, index, 0), point)
        near = np.exp(-np.where(seen, depth, 0) / scene.haze)[..., None]
        # What takes up less than a 200th of the image casts no shadow worth its time.
        casters = [solids[p.solid] for p in patches if 200 * p.area > depth.size and not solids[p.solid].inside]
        shown = surface.albedo() * _shade(surface, casters, point, scene.light)
        colour = np.where(seen[..., None], near * shown + (1 - near) * colour, colour)
        label[seen] = surface.label[seen]
    return Rendering(colour.clip(0, 1), depth, label)


def _intersect(solid: Solid, origin: Array, direction: Array) -> tuple[Array, Array]:
    """Find where rays (3, ...) enter and leave ``solid``; enter ≥ leave for a miss."""
    x, y, z = origin[0] - solid.center[0], origin[1] - solid.center[1], origin[2] - solid.center[2]
    u, v, w = direction
    if solid.yaw != 0:
        c, s = math.cos(solid.yaw), math.sin(solid.yaw)
        x, z, u, w = c * x - s * z, s * x + c * z, c * u - s * w, s * u + c * w
    a, b, c = solid.half
    if solid.shape == "box":
        return _within(_within(_slab(x, u, a), _slab(y, v, b)), _slab(z, w, c))
    quadric = [(x / a, u / a), (z / c, w / c)]
    if solid.shape == "cylinder":
        return _within(_ball(quadric), _slab(y, v, b))
    return _ball([*quadric, (y / b, v / b)])


def _slab(origin: Array, direction: Array, half: float) -> tuple[Array, Array]:
    """Find where lines are within ``half`` of 0 along one axis."""
    inverse = 1 / (direction + 1e-12)  # changes no direction but 0
    middle, reach = -origin * inverse, np.abs(inverse) * half
    return middle - reach, middle + reach


def _ball(axes: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Find where lines are within 1 of 0 in the plane or space of ``axes`` (origin, direction)."""
    squared: Any = sum(d * d for _, d in axes) + 1e-12
    along: Any = sum(o * d for o, d in axes) / squared
    root = along * along - (sum(o * o for o, _ in axes) - 1) / squared
    reach = np.sqrt(np.maximum(root, 0))
    return np.where(root > 0, -along - reach, np.inf), reach - along


def _within(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    return np.maximum(first[0], second[0]), np.minimum(first[1], second[1])


class _Surface:
    """Says what is seen at each pixel: position on its solid, face, normal, label."""

    def __init__(self, solids: list[Solid], index: Array, point: Array) -> None:
        half = np.array([solid.half for solid in solids], np.float32).T[:, index]
        center = np.array([solid.center for solid in solids], np.float32).T[:, index]
        yaw = np.array([solid.yaw for solid in solids], np.float32)
        c, s = np.cos(yaw)[index], np.sin(yaw)[index]
        offset = point - center
        self.local = np.stack([c * offset[0] - s * offset[2], offset[1], s * offset[0] + c * offset[2]])
        relative = self.local / half
        shape = np.array([("box", "ellipsoid", "cylinder").index(solid.shape) for solid in solids])[index]
        cap = (shape == 2) & (np.abs(relative[1]) > 0.999)
        self.face = np.where((shape == 2) & ~cap, 2, np.where(cap, 1, np.abs(relative).argmax(axis=0)))
        on_face = np.sign(relative) * (np.arange(3)[:, None, None] == self.face)
        round_ = relative / half
        round_[1] *= shape != 2
        normal = np.where((shape == 0) | cap, on_face, round_)
        inside = np.array([-1.0 if solid.inside else 1.0 for solid in solids], np.float32)[index]
        normal *= inside / np.maximum(np.sqrt((normal * normal).sum(axis=0)), 1e-9)
        self.normal = np.stack([c * normal[0] + s * normal[2], normal[1], -s * normal[0] + c * normal[2]])
        # Floor, ceiling and walls of an inside box have classes and materials of their own.
        side = np.where(self.face != 1, 2, (relative[1] > 0).astype(np.int64))
        labels = [solid.label if isinstance(solid.label, tuple) else (solid.label,) * 3 for solid in solids]
        self.label: Array = np.array(labels)[index, side]
        self.material: Array = 3 * index + side
        own = [(solid.material,) * 3 if isinstance(solid.material, Material) else solid.material for solid in solids]
        self._materials: list[Material] = [material for three in own for material in three]

    def albedo(self) -> Array:
        """Give the surface's own colours, (H, W, 3) of 0..1."""
        x, y, z = self.local
        u, v = np.where(self.face == 0, z, x), np.where(self.face == 1, z, y)
        table, which = self._materials, self.material
        period = np.array([m.period for m in table], np.float32).T[:, which]
        phase = np.array([m.phase for m in table], np.float32).T[:, which]
        a, b = 2 * np.pi * (u / period[0] + phase[0]), 2 * np.pi * (v / period[1] + phase[1])
        sa, sb = np.sin(a), np.sin(b)
        mixes = (
            np.zeros_like(sa),
            np.clip(4 * sa, -1, 1),
            np.clip(8 * sa * sb, -1, 1),
            np.sin(a + 1.7 * sb) * np.sin(b + 1.3 * np.sin(0.7 * a)),
            np.where(np.maximum(sa, sb) > 0.94, np.float32(1), np.float32(-0.8)),
            np.clip(4 * sb, -1, 1),
        )
        pattern = np.array([m.pattern for m in table])[which]
        mix = (0.5 + 0.5 * np.choose(pattern, mixes))[..., None]
        first, second = (np.array([m[part] for m in table], np.float32)[which] for part in (0, 1))
        return first * (1 - mix) + second * mix


def _shade(surface: _Surface, casters: list[Solid], point: Array, light: Light) -> Array:
    """Give the light, (H, W, 3), that falls on each pixel's surface."""
    to_light = np.array(light.position, np.float32)[:, None, None] - point
    cosine = (surface.normal * to_light).sum(axis=0) / np.sqrt((to_light * to_light).sum(axis=0))
    facing = cosine > 0
    # Traced for every other pixel, then spread: shadows may be coarse, edges of things may not.
    coarse = facing[::2, ::2]
    start, path = (point + np.float32(0.02) * surface.normal)[:, ::2, ::2][:, coarse], to_light[:, ::2, ::2][:, coarse]
    dark = np.zeros(start.shape[1], bool)
    for solid in casters:
        enter, leave = _intersect(solid, start, path)
        dark |= (enter < leave) & (leave > 0) & (enter < 1)
    shadow = np.zeros(coarse.shape, bool)
    shadow[coarse] = dark
    shadow = shadow.repeat(2, axis=0).repeat(2, axis=1)[: cosine.shape[0], : cosine.shape[1]]
    direct = (
        np.float32(1 - light.ambient) * np.where(shadow, np.float32(0.15), np.float32(1)) * np.where(facing, cosine, 0)
    )
    ambient = light.ambient * (np.float32(0.85) + np.float32(0.15) * surface.normal[1])
    lit: Array = ambient[..., None] + direct[..., None] * light.colour.astype(np.float32)
    return lit
