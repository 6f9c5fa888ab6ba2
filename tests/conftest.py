import os

# Some virtual machines announce AMX and then trap on it. Set before torch loads oneDNN.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from helpers.files import CAMERA, SIZE, save

settings.register_profile("unhurried", settings(), deadline=None)  # a busy machine is no failure
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def reproducible() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_worker() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a correct folder data set of three samples in splits train (a, b) and test (c)."""

    def make(**changes: object) -> Path:
        root = tmp_path / "set"
        random = np.random.default_rng(0)
        for id in "abc":
            save(random.integers(0, 256, (*SIZE, 3), dtype=np.uint8), root / "images" / f"{id}.png")
            save(random.integers(500, 4000, SIZE).astype(np.uint16), root / "depth" / f"{id}.png")
            save(random.integers(0, 3, SIZE).astype(np.uint8), root / "labels" / f"{id}.png")
        description = {
            "name": "tiny",
            "classes": ["wall", "floor", "thing"],
            "ignore": 255,
            "metres_per_count": 0.001,
            "invalid_depth": 0,
            "camera": CAMERA,
            **changes,
        }
        (root / "dataset.json").write_text(json.dumps({k: v for k, v in description.items() if v is not None}))
        (root / "splits").mkdir()
        (root / "splits" / "train.txt").write_text("a\nb\n")
        (root / "splits" / "test.txt").write_text("c\n")
        return root

    return make
