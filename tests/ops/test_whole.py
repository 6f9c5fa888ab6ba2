"""What ONNX files have for our operators, run operator by operator, against the plain engine."""

from __future__ import annotations

import pytest
import torch

from malleable.assign import malleable_assign
from malleable.ops import whole
from malleable.ops.engines import plain
from malleable.ops.window import Window

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

WINDOWS = {
    "usual": Window.of(3, 1, 1),
    "strided": Window.of(3, 2, 1),
    "dilated and strided": Window.of(3, 2, 2, 2),
    "even, lopsided": Window((2, 4), (1, 3), (2, 1, 0, 1)),
    "stride beyond the kernel": Window.of(2, 3),
    "pointwise": Window.of(1),
}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize(("channels", "out", "groups"), [(4, 6, 1), (4, 6, 2), (4, 4, 4)])
@pytest.mark.parametrize("is_constant", [False, True])
def test_convolution(window: Window, channels: int, out: int, groups: int, is_constant: bool) -> None:
    x = torch.randn(2, channels, 9, 10)
    weight, bias = torch.randn(3 * out, channels // groups, *window.kernel_size), torch.randn(out)
    assign = torch.rand(2, 3, window.taps, *window.output_size(x.shape[2:]))
    center = torch.rand(3) if is_constant else None
    if center is not None:
        assign[:, :, window.center] = center.view(-1, 1, 1)
    expected = plain.forward(x, weight, assign, window, groups) + bias.view(-1, 1, 1)
    arrays = [None if t is None else t.numpy() for t in (x, weight, assign, bias, center)]
    found = whole.conv2d(*arrays, window.stride, window.padding, window.dilation, groups)
    torch.testing.assert_close(torch.from_numpy(found.value), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 1e-4])
def test_assignment(temperature: float) -> None:
    d = torch.cat([torch.linspace(-4, 4, 50), torch.tensor([-1e9, 1e9, 0.0, 0.5])]).view(1, 6, 3, 3)
    centers, scale = torch.tensor([-2.0, -0.7, 0.1, 1.2, 2.0]), torch.tensor([0.2, 1.5, 0.3])
    expected = malleable_assign(d, centers, temperature) * scale.view(1, -1, 1, 1, 1)
    found = whole.scaled_assign(d.numpy(), centers.numpy(), torch.tensor(temperature).numpy(), scale.numpy())
    torch.testing.assert_close(torch.from_numpy(found.value), expected, rtol=1e-5, atol=1e-6)
