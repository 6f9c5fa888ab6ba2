"""What the page draws of one pixel, in numbers; ``views.js`` does the drawing."""

from __future__ import annotations

from importlib.resources import files
from itertools import count
from typing import Any

import numpy as np

from malleable.data.sample import Sample
from malleable.explorer.layer import Layer, Seen, field, look
from malleable.figures.style import Array

_numbers = count(1)


def source(name: str) -> str:
    """Read a file of this folder that the browser gets."""
    return (files("malleable.explorer") / name).read_text(encoding="utf-8")


def view(layer: Layer, sample: Sample, pixel: tuple[int, int]) -> dict[str, Any]:
    """Describe what ``layer`` sees at ``pixel``, for ``views.js``; taps outside of the image are left out."""
    seen, (d, g) = look(layer, sample, pixel), field(layer)
    camera, step = sample.camera, layer.rate * layer.dilation
    half = layer.taps // 2 * step
    pivot = _pivot(seen, sample)
    shares = seen.g[:, seen.inside].mean(1)
    return {
        "number": next(_numbers),
        "pixel": seen.pixel,
        "grid": layer.rate,
        "step": step,
        "half": half,
        "taps": [
            {
                "x": int(x),
                "y": int(y),
                "depth": float(depth) if depth > 0 else None,
                "d": round(float(difference), 4) if known else None,
                "g": _short(taken),
            }
            for (x, y), depth, difference, known, taken, inside in zip(
                seen.taps, seen.depth, seen.d, seen.known, seen.g.T, seen.inside, strict=True
            )
            if inside
        ],
        "kernels": [
            {
                "label": look.label,
                "colour": look.colour,
                "share": round(float(share), 4),
                "scale": layer.scales[k] if len(layer.scales) > 1 else None,
            }
            for k, (look, share) in enumerate(zip(layer.looks, shares, strict=True))
        ],
        "field": {"d": _short(d), "g": [_short(one) for one in g]},
        "unit": seen.unit,
        "metric": layer.conv == "depth_aware",
        "camera": {name: getattr(camera, name) for name in ("fx", "fy", "cx", "cy")},
        "pivot": pivot,
        "radius": _radius(seen, pivot, (half + step) / camera.focal),
        "said": _said(seen, shares.sum()),
    }


def _pivot(seen: Seen, sample: Sample) -> list[float]:
    """Choose what the cloud turns around: x, y and depth of the pixel, or as deep as what is near it; else nothing."""
    depth = float(seen.depth[len(seen.depth) // 2])
    if seen.unit is None:
        near = seen.depth[seen.depth > 0]
        known = near if len(near) else sample.depth[sample.depth > 0].numpy()
        depth = float(np.median(known)) if len(known) else 0.0
    return [*map(float, seen.pixel), depth] if depth else []


def _radius(seen: Seen, pivot: list[float], across: float) -> float:
    """Tell how many metres around the pivot are worth showing, for a window ``across`` wide at one metre."""
    if not pivot:
        return 1.0
    lateral = across * pivot[2]
    known = seen.depth[seen.depth > 0]
    along = float(np.abs(known - pivot[2]).max()) if len(known) else 0.0
    return 1.3 * max(lateral, min(along, 4 * lateral))


def _said(seen: Seen, taken: float) -> str:
    x, y = seen.pixel
    if seen.unit is None:
        return f"Pixel ({x}, {y}) has no depth, so all taps of its window count as the layer is told to."
    unknown, neighbours = (int(taps.sum()) for taps in (seen.inside & ~seen.known, seen.inside))
    depth = seen.depth[len(seen.depth) // 2]
    blind = f" {unknown} of its {neighbours} taps have no depth." if unknown else ""
    return f"Pixel ({x}, {y}) lies at {depth:.2f} m. The kernels take {taken:.0%} of its window.{blind}"


def _short(values: Array) -> list[float]:
    return [round(float(value), 4) for value in values]
