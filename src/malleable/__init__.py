"""RGB-D convolutions that learn how far they see along the depth axis."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from malleable import functional
from malleable.camera import Camera, to_metres
from malleable.geometry import Geometry
from malleable.layers import Conv25d, DepthAwareAvgPool2d, DepthAwareConv2d, MalleableConv2d
from malleable.models import cost, deeplabv3plus
from malleable.models.convert import convert
from malleable.models.parameters import parameter_groups
from malleable.models.summary import summary

if TYPE_CHECKING:
    from malleable import data
    from malleable.inference.estimate import DepthEstimator
    from malleable.inference.load import load_trained as load
    from malleable.training.loop import fit

__version__ = "0.2.0"

__all__ = [
    "Camera",
    "Conv25d",
    "DepthAwareAvgPool2d",
    "DepthAwareConv2d",
    "DepthEstimator",
    "Geometry",
    "MalleableConv2d",
    "convert",
    "cost",
    "data",
    "deeplabv3plus",
    "fit",
    "functional",
    "load",
    "parameter_groups",
    "summary",
    "to_metres",
]


def __getattr__(name: str) -> Any:
    # These are imported on first use: the layers need neither torchvision nor Pillow.
    if name == "data":
        return import_module("malleable.data")
    if name == "DepthEstimator":
        return import_module("malleable.inference.estimate").DepthEstimator
    if name == "load":
        return import_module("malleable.inference.load").load_trained
    if name == "fit":
        return import_module("malleable.training.loop").fit
    raise AttributeError(f"module 'malleable' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
