"""Networks for RGB-D scene parsing."""

from malleable.models.deeplab import DeepLabV3Plus, deeplabv3plus

__all__ = ["DeepLabV3Plus", "deeplabv3plus"]
