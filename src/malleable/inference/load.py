"""A trained network from wherever it lies: a checkpoint, a run's folder, or a folder that was shared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from malleable.data.palette import Colour, check_palette, default_palette
from malleable.files import read_json
from malleable.models import DeepLabV3Plus
from malleable.runs.checkpoint import FOLDER, check_finite, read_checkpoint
from malleable.runs.config import Config, build_network

WEIGHTS, CONFIG = "model.safetensors", "config.json"
"""A folder that was shared holds these; ``malleable.inference.share`` writes them."""


@dataclass(frozen=True)
class Trained:
    """Holds a network in eval mode and what its answers mean.

    ``dataset`` and ``step`` say what it learned from and for how long, as far as that is known. ``config`` is that of
    its run, and ``run`` the run's folder, None if it does not lie in one.
    """

    net: DeepLabV3Plus
    classes: tuple[str, ...]
    palette: tuple[Colour, ...]
    dataset: str = ""
    step: int | None = None
    config: Config | None = None
    run: Path | None = None


def load_trained(path: str | Path, device: str = "cpu") -> Trained:
    """Read a network to use, not to train on. Nothing in the files is executed.

    Args:
        path: a checkpoint, a folder of checkpoints (the newest is taken) or a run's folder, or a folder with
            model.safetensors and config.json. Of a checkpoint the averaged weights are taken if there are any.
        device: ``"auto"`` takes a GPU if there is one.
    """
    path = Path(path)
    trained = _from_shared(path) if (path / WEIGHTS).is_file() else _from_checkpoint(path)
    trained.net.to(choose_device(device)).eval()
    return trained


def choose_device(device: str) -> torch.device:
    """Find the device that ``"auto"`` or one of torch's names stands for."""
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, and torch must find it, got {device!r}") from error
    return chosen


def _from_checkpoint(path: Path) -> Trained:
    checkpoint = read_checkpoint(path)
    net = build_network(checkpoint.config.model, len(checkpoint.classes), pretrained=False)
    net.load_state_dict(checkpoint.ema if checkpoint.ema is not None else checkpoint.model)
    folder = (path.parent if path.is_file() else path).absolute()
    run = folder.parent if folder.resolve().name == FOLDER else folder if (folder / FOLDER).is_dir() else None
    return Trained(
        net, checkpoint.classes, checkpoint.palette, checkpoint.dataset, checkpoint.step, checkpoint.config, run
    )


def _from_shared(folder: Path) -> Trained:
    read_json(folder / CONFIG)  # from_pretrained would build a default network if it were missing
    try:
        net = DeepLabV3Plus.from_pretrained(folder)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            about: dict[str, Any] = {key: _value(text) for key, text in (file.metadata() or {}).items()}
    except (SafetensorError, TypeError) as error:
        raise ValueError(f"{folder} does not hold a network of malleable ({error})") from error
    check_finite(net.state_dict(), folder / WEIGHTS)
    count = net.classifier.out_channels
    classes, palette, step = about.get("classes"), about.get("palette"), about.get("step")
    return Trained(
        net=net,
        classes=tuple(classes) if _names(classes, count) else tuple(f"class {index}" for index in range(count)),
        palette=default_palette(count) if palette is None else check_palette(palette, count),
        dataset=str(about.get("dataset") or ""),
        step=step if isinstance(step, int) else None,
    )


def _names(classes: object, count: int) -> TypeGuard[list[str]]:
    return isinstance(classes, list) and len(classes) == count and all(isinstance(name, str) for name in classes)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None  # written by another program
