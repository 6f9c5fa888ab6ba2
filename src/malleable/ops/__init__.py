"""One operator, ``depth_conv2d``, is run by the one of several engines that suits the call."""

from malleable.ops.depth_conv2d import depth_conv2d

__all__ = ["depth_conv2d"]
