"""An operator as ONNX Runtime computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn


def as_onnx(function: Callable[[Tensor], Tensor], example: Tensor, folder: Path) -> Callable[[Tensor], Tensor]:
    """Export ``function`` of depth (1, 1, H, W) for any H and W, and return what runs the file; skip without it."""
    onnxruntime = pytest.importorskip("onnxruntime")

    class Net(nn.Module):
        def forward(self, depth: Tensor) -> Tensor:
            return function(depth)

    size = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    program = torch.onnx.export(Net().eval(), (example,), input_names=["depth"], dynamic_shapes=(size,), verbose=False)
    program.save(folder / "net.onnx")
    session = onnxruntime.InferenceSession(folder / "net.onnx", providers=["CPUExecutionProvider"])

    def run(depth: Tensor) -> Tensor:
        (output,) = session.run(None, {"depth": np.asarray(depth)})
        return torch.from_numpy(output)

    return run
