"""Convolutions that learn how far they see along the depth axis."""

from malleable import cost, functional
from malleable.camera import Camera, to_metres
from malleable.convert import convert
from malleable.geometry import Geometry
from malleable.layers import Conv25d, DepthAwareAvgPool2d, DepthAwareConv2d, MalleableConv2d
from malleable.models import deeplabv3plus
from malleable.parameters import parameter_groups
from malleable.summary import summary

__all__ = [
    "Camera",
    "Conv25d",
    "DepthAwareAvgPool2d",
    "DepthAwareConv2d",
    "Geometry",
    "MalleableConv2d",
    "convert",
    "cost",
    "deeplabv3plus",
    "functional",
    "parameter_groups",
    "summary",
    "to_metres",
]
