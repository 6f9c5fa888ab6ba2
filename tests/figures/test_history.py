"""metrics.jsonl as arrays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from malleable.figures.history import curves, field_paths
from malleable.models import DeepLabV3Plus
from malleable.runs.log import Row, receptive_fields


def write(folder: Path, *rows: dict[str, float]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "lo')
    return folder


def test_curves_have_only_the_steps_that_measured_them(tmp_path: Path) -> None:
    run = write(tmp_path, {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "val/miou": 40.0})
    found = curves(run)
    assert {name: [part.tolist() for part in curve] for name, curve in found.items()} == {
        "loss": [[1, 2], [3, 2]],
        "miou": [[2], [40]],
    }
    assert curves(tmp_path / "nothing") == {}


def test_paths_are_what_the_journal_wrote(tmp_path: Path) -> None:
    net = DeepLabV3Plus("resnet10t", 3, kernels=11, stages=(2, 5))
    first = receptive_fields(net)
    layer = net.backbone.layers()["layer4.0.conv1"]
    with torch.no_grad():
        layer.centers += torch.arange(13)  # type: ignore[operator]
        layer.rebalance += torch.arange(11)  # type: ignore[operator]
    layer.temperature = 2.0  # type: ignore[assignment]
    last = receptive_fields(net)
    rows = [Row(1, receptive_fields=first), Row(1, scores={"miou": 3.0}), Row(5, receptive_fields=last)]
    write(tmp_path, *({"step": row.step, **row.columns()} for row in rows))
    paths = field_paths(tmp_path)
    assert list(paths) == ["layer1.0.conv1", "layer4.0.conv1"]
    path = paths["layer4.0.conv1"]
    assert path.steps.tolist() == [1, 5]
    np.testing.assert_allclose(path.centers, [np.arange(-6, 7), np.arange(-6, 7) + np.arange(13)])
    assert path.temperature.tolist() == [1, 2]
    np.testing.assert_allclose(path.scales[1], layer.scales.tolist(), rtol=1e-6)  # type: ignore[union-attr]
