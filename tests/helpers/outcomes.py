"""Runs' folders as training and evaluation leave them, without any training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from malleable.runs.config import Config, DataConfig, ModelConfig, TrainConfig
from malleable.runs.folder import write_settings

CLASSES = ("wall", "floor", "chair")


def write_outcome(
    folder: Path,
    model: ModelConfig | None = None,
    *,
    miou: float | None = None,
    validated: float | None = None,
    classes: Sequence[str] = CLASSES,
    steps: int = 20,
    done: int | None = None,
    seed: int = 0,
    root: str = "rooms",
    **results: Any,
) -> Path:
    """A run of ``done`` of ``steps`` steps.

    ``miou``: what results.json says, ``validated``: what the last validation said; without them there is none.
    """
    model = model or ModelConfig("resnet10t", conv=None, pretrained=False)
    config = Config(model, DataConfig(root=root, crop=(64, 96)), TrainConfig(steps=steps, batch_size=4, seed=seed))
    done = steps if done is None else done
    write_settings(folder, config)
    rows: list[Mapping[str, float]] = [
        {"step": step, "loss": 2 / step, "lr": 0.01, "images_per_second": speed}
        for step, speed in ((max(1, done // 2), 5.0), (done, 7.0), (done, 100.0))
    ]
    if validated is not None:
        rows.append({"step": done, **scores(validated), **{f"val/iou/{name}": validated for name in classes}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if miou is not None:
        iou = dict.fromkeys(classes, miou)
        plain = {key.removeprefix("val/"): value for key, value in scores(miou).items()}
        setting = {"dataset": "synthetic-rooms", "split": "val", "scales": [1.0], "flip": False, "step": done}
        (folder / "results.json").write_text(json.dumps({**plain, "iou": iou, **setting, **results}))
    return folder


def scores(miou: float) -> dict[str, float]:
    return {"val/miou": miou, "val/pixel_accuracy": miou + 20, "val/mean_accuracy": miou + 10}
