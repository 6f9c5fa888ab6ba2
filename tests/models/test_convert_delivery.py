"""How depth reaches the layers of a converted network: whatever runs the network, and whenever."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import malleable as mb
from helpers.networks import Tiny, Unit, relative_error, scene
from malleable.models.convert import Converted
from malleable.models.depth_input import Kind

RGB, DEPTH = scene()
OTHER_DEPTH = scene(seed=1)[1]


class Checkpointed(nn.Module):
    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


def network(depth_input: Kind | None = None) -> Converted:
    torch.manual_seed(0)
    return mb.convert(Tiny(), where=["stage1.0.spatial", "stage2.0.spatial"], depth_input=depth_input)


def checkpointed_network(use_reentrant: bool) -> Converted:
    net = network()
    for name in ("stage1", "stage2"):
        setattr(net.model, name, Checkpointed(getattr(net.model, name), use_reentrant))
    return net


def gradients(net: Converted, loss: Tensor) -> list[Tensor]:
    net.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def run(net: nn.Module, depth: Tensor = DEPTH) -> Tensor:
    return net(RGB, depth=depth, focal=60.0)


def assert_no_geometry_left(net: Converted) -> None:
    with pytest.raises(RuntimeError, match=r"call net\(image, depth=depth, focal=focal\)"):
        net.model(RGB)


class TestEager:
    def test_layers_get_the_depth_of_the_call(self) -> None:
        net = network()
        seen = []
        net.model.stage2[0].spatial.register_forward_pre_hook(lambda layer, args: seen.append(args[1]))
        run(net)
        assert seen[0].depth is DEPTH
        assert_no_geometry_left(net)

    def test_a_layer_can_still_be_called_with_a_geometry(self) -> None:
        layer = network().model.stage1[0].spatial
        assert layer(torch.rand(2, 8, 32, 32), mb.Geometry(DEPTH, 60.0)).shape == (2, 8, 32, 32)

    def test_an_exception_leaves_nothing_behind(self) -> None:
        net = network()
        handle = net.model.stage2[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(net)
        handle.remove()
        assert_no_geometry_left(net)

    def test_a_network_inside_another_sees_its_own_depth(self) -> None:
        inner, outer = network(), mb.convert(Tiny(), where=["stage1.0.spatial", "stage2.0.spatial"])
        alone = run(inner, OTHER_DEPTH)
        found = []

        def call_inner(module: nn.Module, args: tuple[Tensor]) -> None:
            found.append(run(inner, OTHER_DEPTH))

        expected = run(outer)
        outer.model.stage2.register_forward_pre_hook(call_inner)
        assert torch.equal(run(outer), expected)
        assert torch.equal(found[0], alone)

    def test_a_network_that_calls_itself_gets_its_depth_back(self) -> None:
        net = network()
        expected = run(net)
        calls = []

        def call_again(module: nn.Module, args: tuple[Tensor]) -> None:
            if not calls:
                calls.append(0)
                run(net, OTHER_DEPTH)

        net.model.stage2.register_forward_pre_hook(call_again)
        assert torch.equal(run(net), expected)

    def test_threads_do_not_mix(self) -> None:
        net = network()
        depths = [DEPTH, OTHER_DEPTH]
        expected = [run(net, depth) for depth in depths]
        inside = threading.Barrier(2, timeout=30)
        net.model.stage1.register_forward_pre_hook(lambda *_: (inside.wait(), None)[1])
        found: dict[int, Tensor] = {}
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: run(net, depths[i])})) for i in range(len(depths))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(found[i], expected[i]) for i in range(2))

    def test_autocast(self) -> None:
        net = network()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = run(net)
        assert output.dtype == torch.bfloat16
        assert relative_error(output.float(), run(net)) < 0.05


class TestCopies:
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
    def test_a_copy_has_a_slot_of_its_own(self, copied: object) -> None:
        net = network()
        twin = copied(net)  # type: ignore[operator]
        expected = run(net)
        twin.model.stage1.register_forward_pre_hook(lambda *_: assert_no_geometry_left(net))
        assert torch.equal(run(twin), expected)

    def test_copying_during_a_pass_takes_no_geometry_along(self) -> None:
        net = network()
        twins = []
        handle = net.model.stage2.register_forward_pre_hook(lambda *_: twins.append(copy.deepcopy(net)))
        expected = run(net)
        handle.remove()
        twins[0].model.stage2._forward_pre_hooks.clear()
        assert_no_geometry_left(twins[0])
        assert torch.equal(run(twins[0]), expected)

    def test_torch_save(self) -> None:
        net, file = network(), io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        assert torch.equal(run(torch.load(file, weights_only=False)), run(net))


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
class TestActivationCheckpointing:
    def test_gradients(self, use_reentrant: bool) -> None:
        net, plain = checkpointed_network(use_reentrant), network()
        for actual, expected in zip(gradients(net, run(net).sum()), gradients(plain, run(plain).sum()), strict=True):
            torch.testing.assert_close(actual, expected)
        assert_no_geometry_left(net)

    @pytest.mark.parametrize("first", [0, 1])
    def test_two_passes_and_the_backward_of_one(self, use_reentrant: bool, first: int) -> None:
        net, plain = checkpointed_network(use_reentrant), network()
        passes = [run(net, DEPTH), run(net, OTHER_DEPTH)]
        for i in (first, 1 - first):
            expected = gradients(plain, run(plain, (DEPTH, OTHER_DEPTH)[i]).sum())
            for a, b in zip(gradients(net, passes[i].sum()), expected, strict=True):
                torch.testing.assert_close(a, b)

    def test_one_backward_over_two_passes(self, use_reentrant: bool) -> None:
        def loss(net: Converted) -> Tensor:
            a, b = run(net, DEPTH), run(net, OTHER_DEPTH)
            return (a * a).sum() + b.sum()

        net, plain = checkpointed_network(use_reentrant), network()
        for a, b in zip(gradients(net, loss(net)), gradients(plain, loss(plain)), strict=True):
            torch.testing.assert_close(a, b)

    def test_the_whole_network_checkpointed(self, use_reentrant: bool) -> None:
        net, plain = network(), network()
        rgb = RGB.clone().requires_grad_()
        loss = checkpoint(lambda x: net(x, depth=DEPTH, focal=60.0), rgb, use_reentrant=use_reentrant).sum()
        for a, b in zip(gradients(net, loss), gradients(plain, run(plain).sum()), strict=True):
            torch.testing.assert_close(a, b)

    def test_a_backward_that_fails_leaves_nothing_behind(self, use_reentrant: bool) -> None:
        net = checkpointed_network(use_reentrant)
        output = run(net)
        net.model.stem.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        assert_no_geometry_left(net)
        assert torch.equal(run(net), output)


class TestCompilers:
    def test_compile_in_one_graph_with_gradients(self) -> None:
        net, plain = network(), network()
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        for depth in (DEPTH, OTHER_DEPTH):
            output = run(compiled, depth)
            torch.testing.assert_close(output, run(plain, depth))
        for a, b in zip(gradients(net, output.sum()), gradients(plain, run(plain, OTHER_DEPTH).sum()), strict=True):
            torch.testing.assert_close(a, b)
        assert_no_geometry_left(net)

    def test_compiled_parts_of_an_eager_network(self) -> None:
        net = network()
        expected = [run(net, depth) for depth in (DEPTH, OTHER_DEPTH)]
        net.model.stage1.compile(fullgraph=True, backend="eager")
        assert all(torch.equal(run(net, d), e) for d, e in zip((DEPTH, OTHER_DEPTH), expected, strict=True))

    def test_compile_with_a_graph_break_inside(self) -> None:
        net = network()
        expected = run(net)
        forward = net.model.stage1[0].forward

        def broken(x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return forward(x)

        net.model.stage1[0].forward = broken
        assert torch.equal(run(torch.compile(net, backend="eager")), expected)

    def test_onnx_at_sizes_it_was_not_exported_with(self, tmp_path: Path) -> None:
        onnxruntime = pytest.importorskip("onnxruntime")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), Unit(4, 4, 2))
        net = mb.convert(model, where=["1.spatial"]).eval()
        size = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
        program = torch.onnx.export(
            net,
            (RGB,),
            kwargs={"depth": DEPTH, "focal": torch.tensor([60.0, 70.0])},
            dynamic_shapes={"args": (size,), "depth": size, "focal": None},
            dynamo=True,
            verbose=False,
        )
        program.save(tmp_path / "net.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]
        for height, width in ((64, 64), (45, 70)):
            rgb, depth = scene(height=height, width=width, seed=3)
            focal = torch.tensor([50.0, 90.0])
            (actual,) = session.run(None, dict(zip(names, map(np.asarray, (rgb, depth, focal)), strict=True)))
            expected = net(rgb, depth=depth, focal=focal)
            assert relative_error(torch.from_numpy(actual), expected.detach()) < 1e-5


class TestDistributed:
    @pytest.fixture
    def group(self, tmp_path: Path) -> Iterator[None]:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()

    @pytest.mark.parametrize("depth_input", [None, "metric"])
    def test_ddp(self, group: None, depth_input: Kind | None) -> None:
        net, plain = network(depth_input), network(depth_input)
        loss = run(nn.parallel.DistributedDataParallel(net)).sum()
        for a, b in zip(gradients(net, loss), gradients(plain, run(plain).sum()), strict=True):
            torch.testing.assert_close(a, b)
