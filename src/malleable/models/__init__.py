"""These networks parse RGB-D scenes."""

from malleable.models.deeplab import DeepLabV3Plus, deeplabv3plus

__all__ = ["DeepLabV3Plus", "deeplabv3plus"]
