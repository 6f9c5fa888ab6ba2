"""Image files: read with errors that name the file, written so that no half file is ever left."""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from malleable.files import require_file, whole_file

Array = npt.NDArray[Any]


def read_pixels(path: Path, colour: bool = False) -> tuple[Array, str]:
    """Read the pixels of a PNG or JPEG file as they are, or as ``colour``, and the Pillow mode they have in it."""
    require_file(path)
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:  # some other formats start programs
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and image.width * image.height > limit:  # Pillow itself only warns up to twice this
                raise Image.DecompressionBombError(f"{image.width}×{image.height} pixels, more than {limit}")
            deep = image.mode in ("I", "F") or image.mode.startswith("I;")
            packed = image.tile[0][3] if image.tile else image.mode
            mode = packed if packed in ("L;2", "L;4") else image.mode  # Pillow made 85 or 17 of 1
            convert = colour and image.mode != "RGB" and not deep
            return np.array(image.convert("RGB") if convert else image), mode
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"{path} is too large to be read safely ({error}); raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        ) from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an image ({error}); replace or export it again") from error


def read_rgb(path: Path) -> Tensor:
    """Read a colour image, (3, H, W) uint8."""
    pixels, mode = read_pixels(path, colour=True)
    if pixels.ndim != 3:
        raise ValueError(f"{path} is a {mode} image; colour images must have 8 bits per channel")
    return torch.from_numpy(pixels).permute(2, 0, 1)


def read_counts(path: Path) -> Tensor:
    """Read depth or disparity, (H, W) int32, from a 16-bit grey image."""
    pixels, mode = read_pixels(path)
    if path.suffix.lower() in (".jpg", ".jpeg"):
        raise ValueError(
            f"{path} is a JPEG image: 8 bits, and lossy, which cannot hold depth; save depth as a 16-bit grey PNG"
        )
    if mode != "I" and not mode.startswith("I;16"):
        bits = {"L": "8-bit", "P": "palette", "1": "1-bit"}.get(mode, mode)
        raise ValueError(
            f"{path} is a {bits} image, too coarse for metric depth; save it as a 16-bit grey PNG and set "
            "metres_per_count to match"
        )
    return torch.from_numpy(pixels.astype(np.int32))


def read_metres(path: Path) -> Tensor:
    """Read depth in metres, (H, W) float32, 0 where it is none, from a ``.npy`` of shape (H, W) or (1, H, W)."""
    require_file(path)
    try:
        array: Array = np.load(path, allow_pickle=False)
    # A damaged head may claim any size, and NumPy reads it as Python.
    except (OSError, ValueError, EOFError, MemoryError, BadZipFile, SyntaxError, TokenError) as error:
        raise ValueError(f"{path} cannot be read as an array of numbers ({error}); save it again") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError(f"{path} is an archive of arrays (.npz), not one array; save depth with numpy.save")
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"{path} holds {array.dtype}, but depth in .npy is floating point, in metres; save counts as a 16-bit PNG"
        )
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise ValueError(f"{path} has shape {array.shape}, not (H, W) or (1, H, W)")
    metres = torch.from_numpy(array.astype(np.float32))
    return metres.where(metres.isfinite() & (metres > 0), 0)


def read_indices(path: Path) -> Array:
    """Read class indices, (H, W) uint8, from an 8-bit grey or palette image."""
    pixels, mode = read_pixels(path)
    if mode not in ("L", "P"):
        raise ValueError(f"{path} is a {mode} image; labels must be 8-bit grey or palette images of class indices")
    return pixels.astype(np.uint8, copy=False)


def is_whole_png(path: Path) -> bool:
    """Tell whether ``path`` is there and no power cut left it empty or in part."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            image.verify()
        return True
    except (OSError, SyntaxError, ValueError):  # a broken PNG is a SyntaxError to Pillow
        return False


def write_png(pixels: Array, path: Path) -> None:
    """Write an (H, W) uint8 or uint16 or (H, W, 3) uint8 array as PNG, whole or not at all."""
    with whole_file(path, sync=False) as file:
        Image.fromarray(pixels).save(file, format="PNG")
