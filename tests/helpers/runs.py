"""Tiny runs for the tests of training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from malleable.data import FolderWriter, SyntheticScenes
from malleable.runs.checkpoint import read_checkpoint

SETTINGS: dict[str, Any] = {
    "model.backbone": "resnet10t",
    "model.pretrained": "false",
    "model.stages": "[2,3]",
    "data.crop": "[32,32]",
    "data.workers": 0,
    "train.steps": 6,
    "train.batch_size": 2,
    "train.checkpoint_every": 2,
    "train.validate_every": 0,
    "train.log_every": 2,
}


def make_data(folder: Path) -> Path:
    """Seven rooms to learn from and two to validate on, 32 × 40 pixels."""
    scenes = SyntheticScenes("rooms", size=(32, 40), length=9)
    writer = FolderWriter(folder, "tiny", scenes.classes, scenes.palette)
    for scene in scenes:  # type: ignore[attr-defined]
        writer.write(scene)
    writer.finish({"train": scenes.ids[:7], "val": scenes.ids[7:]})
    return folder


def arguments(data: Path, out: Path, **settings: Any) -> list[str]:
    """Of ``malleable train``; ``train__lr=1`` is --train.lr 1."""
    chosen = {**SETTINGS, "data.root": data, "out": out, "accelerator": "cpu"}
    chosen |= {key.replace("__", "."): value for key, value in settings.items()}
    return ["train", *(f"--{key}={value}" for key, value in chosen.items())]


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """``command`` in a process of its own, one thread, its output captured."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("environment", {})}
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def run(command: list[str], **options: Any) -> tuple[int, str]:
    """Exit code and all output."""
    process = start(command, **options)
    out, error = process.communicate(timeout=120)
    return process.returncode, out + error


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, Tensor]:
    return dict(read_checkpoint(out).model)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
