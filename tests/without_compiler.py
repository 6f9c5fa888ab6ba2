"""Collected only by the second run of ``make test``, which hides the compiler: proof that there is really none."""

from __future__ import annotations

import pytest
import torch

from malleable.functional import depth_conv2d
from malleable.ops.engines.native import build


def test_no_library_is_found_not_even_one_built_earlier() -> None:
    assert "no C++ compiler" in str(build.library())


def test_the_native_engine_cannot_run() -> None:
    x, weight, assign = torch.randn(1, 4, 5, 5), torch.randn(12, 4, 1, 1), torch.rand(1, 3, 1, 5, 5)
    with pytest.raises(RuntimeError, match=r"engine='native' cannot run this call: no C\+\+ compiler"):
        depth_conv2d(x, weight, assign, engine="native")
