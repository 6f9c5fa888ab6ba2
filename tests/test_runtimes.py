"""The layers inside PyTorch's machinery: compile, export, ONNX, checkpointing, distributed training."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import malleable as mb
from malleable.ops.engines.native import build


class Net(nn.Module):
    """A stem, then every layer at its own rate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.malleable = mb.MalleableConv2d(4, 6, 3, 2, 1)
        self.hard = mb.Conv25d(6, 6, 3, padding=2, dilation=2, groups=2)
        self.soft = mb.DepthAwareConv2d(6, 4, 2, padding="same")
        self.pool = mb.DepthAwareAvgPool2d(3, 2, 1)

    def forward(self, image: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        geometry = mb.Geometry(depth, focal)
        x = self.malleable(self.stem(image), geometry)
        return self.pool(self.soft(self.hard(x, geometry), geometry), geometry)


def inputs(batch: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    depth = 2 + 0.1 * torch.randn(batch, 1, height, width)
    depth[:, :, 3:5, 2:9] = 0
    return torch.rand(batch, 3, height, width), depth, torch.rand(batch) * 20 + 30


DYNAMIC: Any = (
    {0: "batch", 2: "height", 3: "width"},
    {0: "batch", 2: "height", 3: "width"},
    {0: "batch"},
)
DYNAMIC_DIMS: Any = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in DYNAMIC)


@pytest.fixture
def backend() -> str:
    """PyTorch's own compiler wants a C++ compiler too; tracing does not."""
    return "aot_eager" if isinstance(build.library(), str) else "inductor"


@pytest.mark.slow
def test_compile(backend: str) -> None:
    net = Net()
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    for size in ((2, 32, 40), (2, 48, 44)):
        arguments = inputs(*size)
        expected, actual = net(*arguments), compiled(*arguments)
        torch.testing.assert_close(actual, expected)
        expected_gradients = torch.autograd.grad(expected.square().sum(), list(net.parameters()))
        actual_gradients = torch.autograd.grad(actual.square().sum(), list(net.parameters()))
        for a, e in zip(actual_gradients, expected_gradients, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_compile_a_layer_that_is_given_a_geometry(backend: str) -> None:
    layer = mb.MalleableConv2d(3, 4, 3, padding=1)
    image, depth, focal = inputs(1, 8, 8)
    geometry = mb.Geometry(depth, focal)
    torch.testing.assert_close(
        torch.compile(layer, fullgraph=True, backend=backend)(image, geometry), layer(image, geometry)
    )


def test_a_compiled_layer_calls_the_operator() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    image, depth, focal = inputs(1, 8, 8)
    torch.compile(mb.MalleableConv2d(3, 4, 3), fullgraph=True, backend=backend)(image, mb.Geometry(depth, focal))
    assert ["malleable.depth_conv2d" in graph for graph in graphs] == [True]


def test_a_compiled_layer_refuses_depth_of_another_batch() -> None:
    layer = mb.MalleableConv2d(3, 4, 3, padding=1)
    image, depth, focal = inputs(3, 8, 8)
    with pytest.raises(ValueError, match="assign must have shape"):
        torch.compile(layer, backend="aot_eager")(image, mb.Geometry(depth[:1], focal[:1]))


def test_export_with_dynamic_sizes() -> None:
    net = Net().eval()
    program = torch.export.export(net, inputs(2, 32, 40), dynamic_shapes=DYNAMIC_DIMS, strict=False)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if name.startswith("malleable")]  # plain operators that any runtime knows
    for size in ((2, 32, 40), (1, 37, 51), (3, 64, 33)):
        arguments = inputs(*size)
        torch.testing.assert_close(program.module()(*arguments), net(*arguments))


class Faded(mb.MalleableConv2d):
    def assign(self, *args: Any) -> Tensor:
        return super().assign(*args) / 2


class Shown(mb.Conv25d):
    def receptive_field(self, d: float | Tensor) -> Tensor:
        return super().receptive_field(d) / 2


class Alone(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, depth: Tensor, focal: Tensor) -> Tensor:
        y: Tensor = self.conv(x, mb.Geometry(depth, focal))
        return y


@pytest.mark.parametrize("kind", [Faded, Shown])
def test_export_of_a_layer_that_assigns_in_its_own_way(kind: type[nn.Module]) -> None:
    net, args = Alone(kind(3, 2, 3, padding=1)).eval(), inputs(2, 8, 9)
    program = torch.export.export(net, args, strict=False)
    torch.testing.assert_close(program.module()(*args), net(*args))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_onnx_with_dynamic_sizes(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    net = Net().eval()
    path = str(tmp_path / "net.onnx")
    torch.onnx.export(net, inputs(2, 32, 40), path, dynamo=True, dynamic_shapes=DYNAMIC_DIMS, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    for size in ((2, 32, 40), (1, 37, 51), (3, 64, 33)):
        arguments = inputs(*size)
        result = session.run(None, {name: a.numpy() for name, a in zip(names, arguments, strict=True)})[0]
        torch.testing.assert_close(torch.from_numpy(result), net(*arguments).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("depth_learns", [False, True])
def test_activation_checkpointing(reentrant: bool, depth_learns: bool) -> None:
    layer = mb.MalleableConv2d(3, 4, 3, padding=1)
    image, depth, focal = inputs(2, 8, 8)
    image.requires_grad_()
    geometry = mb.Geometry(depth.requires_grad_(depth_learns), focal)
    leaves = [image, *layer.parameters()]
    plain = torch.autograd.grad(layer(image, geometry).square().sum(), leaves)
    for leaf in leaves:
        leaf.grad = None
    checkpoint(layer, image, geometry, use_reentrant=reentrant).square().sum().backward()  # type: ignore[union-attr]
    for leaf, expected in zip(leaves, plain, strict=True):
        torch.testing.assert_close(leaf.grad, expected)


def _train(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(Net())
    arguments = [t[rank : rank + 1] for t in _global_batch()]
    for _ in range(3):
        _step(net, net(*arguments))
    torch.save(net.module.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _global_batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return inputs(2, 16, 20)


def _step(net: nn.Module, y: Tensor) -> None:
    net.zero_grad()
    y.square().mean().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_train, (port, str(tmp_path)), nprocs=2)
    torch.manual_seed(0)
    net = Net()
    arguments = _global_batch()
    for _ in range(3):
        _step(net, net(*arguments))
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"{rank}.pt", weights_only=True).items():
            torch.testing.assert_close(value, net.state_dict()[name], rtol=1e-5, atol=1e-6)
