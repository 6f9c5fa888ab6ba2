"""Colours of classes."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import cast

Colour = tuple[int, int, int]


def default_palette(classes: int) -> tuple[Colour, ...]:
    """Give each class a colour: hues by the golden angle, lightness and saturation in turn, so neighbours differ."""
    colours = []
    for index in range(classes):
        hue, lightness, saturation = index * 0.618034 % 1, (0.45, 0.65, 0.32)[index % 3], (0.75, 0.5)[index // 3 % 2]
        colours.append(tuple(round(255 * c) for c in colorsys.hls_to_rgb(hue, lightness, saturation)))
    return tuple(cast(Colour, colour) for colour in colours)


def check_palette(palette: object, classes: int) -> tuple[Colour, ...]:
    """Give ``palette`` as read from a file; raise unless it is one (red, green, blue) of 0..255 per class."""
    if not isinstance(palette, Sequence) or len(palette) != classes:
        raise ValueError(f"'palette' must have one colour for each of the {classes} classes, got {palette!r}")
    for colour in palette:
        channels = list(colour) if isinstance(colour, Sequence) else []
        if len(channels) != 3 or not all(type(c) is int and 0 <= c <= 255 for c in channels):
            raise ValueError(f"'palette' must hold [red, green, blue] of 0..255, got {colour!r}")
    return tuple(cast(Colour, tuple(colour)) for colour in palette)
