"""What a step does to weights and their average, worked out beside it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from lightning_fabric import Fabric
from torch import Tensor

from helpers.runs import arguments, make_data
from malleable import cli
from malleable.data import open_dataset
from malleable.runs.checkpoint import numbered, read_checkpoint
from malleable.runs.config import Config, ModelConfig, TrainConfig
from malleable.runs.folder import read_config
from malleable.training.loss import CrossEntropy
from malleable.training.state import State, load_moments


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "tiny")


def begun(config: Config, data: Path) -> State:
    return State(Fabric(accelerator="cpu", devices=1), config, open_dataset(data, "train"), pretrained=False)


def test_the_average_moves_once_a_step_also_what_has_two_names(data: Path) -> None:
    state = begun(Config(ModelConfig("resnet10t", pretrained=False), train=TrainConfig(ema=0.9)), data)
    assert state.ema is not None
    for net in (state.net, state.ema):
        net.again = net.decoder
    before = {name: tensor.clone() for name, tensor in state.ema.state_dict().items()}
    with torch.no_grad():
        for parameter in state.net.parameters():
            parameter += torch.randn_like(parameter)
    state.advance()
    now = state.net.state_dict()
    for name, average in state.ema.state_dict().items():
        expected = 0.9 * before[name] + 0.1 * now[name] if average.is_floating_point() else now[name]
        torch.testing.assert_close(average, expected)


def test_a_clipped_step_is_as_long_as_it_may_be(data: Path, tmp_path: Path) -> None:
    plain = {"momentum": 0, "weight_decay": 0, "receptive_field_lr": 1, "warmup": 0, "steps": 1}
    recipe = {f"train__{key}": value for key, value in plain.items()}
    command = arguments(data, tmp_path / "run", **recipe, train__lr=0.5, train__clip=0.01)
    assert cli.main(command) == 0
    before = begun(read_config(tmp_path / "run"), data).net
    after = read_checkpoint(numbered(tmp_path / "run" / "checkpoints", 1)[0]).model
    moved = [(after[name] - old.detach()).norm() for name, old in before.named_parameters()]
    assert float(torch.stack(moved).norm()) == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_moments_go_where_the_optimiser_of_now_wants_them() -> None:
    """AdamW counts steps on the CPU unless it is fused, which 16-mixed does not allow."""

    def optimizer(fused: bool, lr: float) -> torch.optim.AdamW:
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, device="meta"))], lr=lr, fused=fused)

    before, now = optimizer(False, 0.1), optimizer(True, 0.2)
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    load_moments(now, {**before.state_dict(), "state": {0: moments}})
    (state,) = now.state.values()
    assert {tensor.device.type for tensor in state.values()} == {"meta"}
    assert (now.param_groups[0]["fused"], now.param_groups[0]["lr"]) == (True, 0.2)


@pytest.mark.parametrize(("scale", "code"), [(0.0, 1), (0.5, 1), (1.0, 0)])  # 0: nothing is scaled
def test_steps_are_skipped_only_while_the_scale_may_be_to_blame(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float, code: int
) -> None:
    def steep(self: CrossEntropy, logits: Tensor, label: Tensor) -> Tensor:
        return original(self, logits, label) + (logits * 0).sum().sqrt()  # 0, with an infinite slope

    def skip(self: State) -> None:  # as a scaler does, which CPUs have not
        assert not all(math.isfinite(parameter.grad.sum()) for parameter in self.net.parameters())
        self.stepper.zero_grad()
        self.step += 1

    original = CrossEntropy.__call__
    monkeypatch.setattr(CrossEntropy, "__call__", steep)
    monkeypatch.setattr(State, "scale", scale)
    monkeypatch.setattr(State, "advance", skip)
    assert cli.main(arguments(data, tmp_path / "run")) == code
