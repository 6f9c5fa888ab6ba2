from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from malleable.data import IGNORE
from malleable.runs.config import TrainConfig
from malleable.training.loss import BootstrappedCrossEntropy, CrossEntropy, build_loss


def example(seed: int, images: int = 3, unlabelled: float = 0.3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(images, 4, 5, 6, generator=generator)
    label = torch.randint(4, (images, 5, 6), generator=generator)
    label[torch.rand(label.shape, generator=generator) < unlabelled] = IGNORE
    return logits, label


def hard_mean(logits: Tensor, label: Tensor, threshold: float, floor: float) -> float:
    """The definition for one image, by sorting a plain list of probabilities."""
    odds = np.exp(logits.double().numpy())
    odds /= odds.sum(0)
    own = [
        odds[int(c), y, x] for (y, x), c in np.ndenumerate(label.numpy()) if c != IGNORE
    ]  # each labelled pixel's probability of its own class
    own.sort()
    number = max(sum(p < threshold for p in own), math.ceil(len(own) * floor))
    return float(np.mean([-math.log(p) for p in own[:number]])) if own else 0.0


@pytest.mark.parametrize("classes", [4, 15, 16, 40])
@pytest.mark.parametrize("images", [0, 1, 3])
def test_logits_side_by_side_give_what_planes_give(classes: int, images: int) -> None:
    planes = (3 * torch.randn(images, classes, 5, 6)).requires_grad_()
    rows = planes.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    label = torch.randint(classes, (images, 5, 6))
    label[torch.rand(label.shape) < 0.3] = IGNORE
    losses = [CrossEntropy()(logits, label) for logits in (planes, rows)]
    torch.testing.assert_close(losses[1], losses[0])
    gradients = [torch.autograd.grad(loss.sum(), x)[0] for loss, x in zip(losses, (planes, rows), strict=True)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    if classes >= 16:
        assert gradients[1].is_contiguous(memory_format=torch.channels_last)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.05, 1.0), st.sampled_from([0.01, 0.0625, 0.5, 1.0]))
def test_bootstrapping_takes_the_hardest_pixels_and_at_least_the_floor(
    seed: int, threshold: float, floor: float
) -> None:
    logits, label = example(seed)
    loss = BootstrappedCrossEntropy(threshold, floor)(logits, label)
    expected = [hard_mean(*image, threshold, floor) for image in zip(logits, label, strict=True)]
    assert loss.tolist() == pytest.approx(expected, rel=1e-5)


def test_only_hard_pixels_get_a_gradient() -> None:
    logits, label = example(1, unlabelled=0.0)
    logits.requires_grad_()
    BootstrappedCrossEntropy(0.3, 1 / 30)(logits, label).sum().backward()
    own = logits.detach().softmax(1).gather(1, label[:, None])[:, 0]
    assert logits.grad is not None
    assert torch.equal(logits.grad.abs().sum(1) > 0, own < 0.3)


def test_the_floor_holds_when_every_pixel_is_easy() -> None:
    label = torch.zeros(1, 4, 4, dtype=torch.int64)
    logits = torch.stack([torch.linspace(8, 9, 16).view(4, 4), torch.zeros(4, 4)])[None].requires_grad_()
    BootstrappedCrossEntropy(0.7, 0.25)(logits, label).sum().backward()
    assert logits.grad is not None
    touched = logits.grad[0, 0].flatten() != 0
    assert touched.tolist() == [True] * 4 + [False] * 12  # the four least certain


@pytest.mark.parametrize("loss", [CrossEntropy(), BootstrappedCrossEntropy()], ids=lambda loss: type(loss).__name__)
def test_an_image_without_labels_weighs_nothing(loss: CrossEntropy) -> None:
    logits, label = example(2)
    label[1] = IGNORE
    logits.requires_grad_()
    value = loss(logits, label)
    value.sum().backward()
    assert logits.grad is not None
    assert value[1] == 0
    assert loss.weight(label)[1] == 0
    assert not logits.grad[1].any()
    assert torch.isfinite(logits.grad).all()


def test_cross_entropy_over_its_weight_is_torch_s_mean() -> None:
    logits, label = example(3)
    loss = CrossEntropy()
    mean = torch.nn.functional.cross_entropy(logits, label, ignore_index=IGNORE)
    assert float(loss(logits, label).sum() / loss.weight(label).sum()) == pytest.approx(float(mean))


@pytest.mark.parametrize("kind", ["cross_entropy", "bootstrapped"])
def test_parts_add_up_to_the_batch(kind: str) -> None:
    logits, label = example(4, images=4)
    loss = build_loss(TrainConfig(loss=kind))  # type: ignore[arg-type]
    parts = [loss(logits[i : i + 2], label[i : i + 2]).sum() for i in (0, 2)]
    assert float(sum(parts)) == pytest.approx(float(loss(logits, label).sum()))


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits, label = example(5)
    assert CrossEntropy()(logits.bfloat16(), label).dtype == torch.float32


@pytest.mark.parametrize(("name", "value"), [("bootstrap_threshold", 0.0), ("bootstrap_floor", 1.5)])
def test_bad_settings_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*got {value}"):
        build_loss(TrainConfig(loss="bootstrapped", **{name: value}))  # type: ignore[arg-type]
