"""How good a network still is when depth is not what it was in training."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from malleable.data.faults import STRESSES, Stress, Stressed
from malleable.data.sample import SampleDataset
from malleable.inference.evaluate import evaluate_network
from malleable.models.summary import sees_depth
from malleable.runs.scores import Protocol


def stress_network(
    net: nn.Module,
    dataset: SampleDataset,
    protocol: Protocol,
    unstressed: float,
    faults: Sequence[Stress] = STRESSES,
    *,
    split: str = "",
    workers: int = 1,
) -> dict[str, float]:
    """Measure the mIoU of ``net`` under each of ``faults``.

    Args:
        unstressed: its mIoU without any, which is that under all of them if ``net`` does not see depth.
    """
    if not sees_depth(net):
        return dict.fromkeys((stress.name for stress in faults), unstressed)
    found = {}
    for stress in faults:
        stressed = Stressed(dataset, stress)
        stressed.name = f"{dataset.name}, {stress.name}"
        found[stress.name] = evaluate_network(net, stressed, protocol, split=split, workers=workers, progress=True).miou
    return found
