"""One operator, ``depth_conv2d``, several engines that can run it, and the choice between them."""

from malleable.ops.depth_conv2d import depth_conv2d

__all__ = ["depth_conv2d"]
