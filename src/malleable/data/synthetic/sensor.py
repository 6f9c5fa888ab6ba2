"""What depth cameras make of true depth: noise, range and holes."""

from __future__ import annotations

import numpy as np

from malleable.data.image_files import Array


def kinect(depth: Array, focal: float, random: np.random.Generator) -> Array:
    """Measure by structured light, from 0.4 to 10 m: noise grows with z², shadows and depth edges leave holes."""
    depth = np.minimum(depth, np.float32(1e3))  # the sky is at infinity
    noise = 0.0012 + 0.0019 * np.square(np.minimum(depth, 10) - 0.4)  # metres, one standard deviation
    measured = depth + noise * random.standard_normal(depth.shape, np.float32)
    edge = _beside_edge(depth, 0.05) & (random.random(depth.shape, np.float32) < 0.4)
    hidden = _hidden(0.075 * focal / depth)
    return np.where(edge | hidden | (depth < 0.4) | (depth > 10), 0, measured).astype(np.float32)


def stereo(depth: Array, focal: float, width: int, random: np.random.Generator, baseline: float = 0.21) -> Array:
    """Match two images ``baseline`` metres apart: noise is even in disparity; what is far or hidden is invalid.

    Accuracy is that of an image 2048 pixels wide, half a pixel, whatever ``width`` is rendered here.
    """
    pixel = width / 2048
    disparity = baseline * focal / depth
    measured = disparity + 0.5 * pixel * random.standard_normal(depth.shape, np.float32)
    known = (measured > 2.5 * pixel) & ~_hidden(disparity)
    return np.where(known, baseline * focal / np.where(known, measured, 1), 0).astype(np.float32)


def _hidden(disparity: Array) -> Array:
    """Find the pixels of the left view that something nearer, to their right, covers in the right view."""
    place = np.arange(disparity.shape[1], dtype=np.float32) - disparity
    ahead = np.minimum.accumulate(place[:, ::-1], axis=1)[:, ::-1]
    covered = np.zeros(disparity.shape, bool)
    covered[:, :-1] = place[:, :-1] > ahead[:, 1:]
    return covered


def _beside_edge(depth: Array, part: float) -> Array:
    """Find the pixels one of whose four neighbours differs by more than ``part`` of the depth."""
    edge = np.zeros(depth.shape, bool)
    for axis in (0, 1):
        jump = np.abs(np.diff(depth, axis=axis)) > part * np.minimum(*_pairs(depth, axis))
        first, second = _pairs(edge, axis)
        first |= jump
        second |= jump
    return edge


def _pairs(image: Array, axis: int) -> tuple[Array, Array]:
    return (image[:-1], image[1:]) if axis == 0 else (image[:, :-1], image[:, 1:])
