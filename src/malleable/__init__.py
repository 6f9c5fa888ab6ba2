"""Convolutions that learn how far they see along the depth axis."""

from malleable import functional
from malleable.camera import Camera, to_metres
from malleable.convert import convert
from malleable.geometry import Geometry
from malleable.layers import Conv25d, DepthAwareAvgPool2d, DepthAwareConv2d, MalleableConv2d

__all__ = [
    "Camera",
    "Conv25d",
    "DepthAwareAvgPool2d",
    "DepthAwareConv2d",
    "Geometry",
    "MalleableConv2d",
    "convert",
    "functional",
    "to_metres",
]
