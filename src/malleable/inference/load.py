"""A trained network from wherever it lies: a checkpoint, a run's folder, a folder that was shared, or the hub."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model

from malleable.data.palette import Colour, check_palette, default_palette
from malleable.files import read_json
from malleable.inference.prediction import predict
from malleable.models.foreign import Network, Unavailable, from_settings
from malleable.runs.checkpoint import FOLDER, check_finite, read_checkpoint
from malleable.runs.config import Config, build_network
from malleable.runs.scores import RESULTS, Protocol, Scores

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
FILES = (WEIGHTS, CONFIG, CARD)
"""A folder that was shared holds these and nothing else; ``malleable.inference.share`` writes them."""

HUB = "hf://"
"""A network on the Hugging Face hub is named so: hf://owner/name."""


@dataclass(frozen=True)
class Trained:
    """Holds a network in eval mode and what its answers mean.

    ``dataset`` and ``step`` say what it learned from and for how long, as far as that is known. ``config`` is that of
    its run, and ``run`` the run's folder, None if it does not lie in one. ``scores`` are what ``malleable evaluate``
    found for these very weights, None if it was not asked.
    """

    net: Network
    classes: tuple[str, ...]
    palette: tuple[Colour, ...]
    dataset: str = ""
    step: int | None = None
    config: Config | None = None
    run: Path | None = None
    scores: Scores | None = None

    def predict(
        self,
        image: Any,
        depth: Any = None,
        *,
        focal: Any = None,
        camera: Any = None,
        estimator: Any = None,
        scales: Sequence[float] = (1.0,),
        flip: bool = False,
        window: tuple[int, int] | None = None,
        overlap: float = 1 / 3,
    ) -> Any:
        """Label an image as ``malleable predict`` does: a :class:`~malleable.inference.prediction.Prediction`.

        For a list of images, or an array with one axis more, a list of predictions; ``depth``, ``focal`` and ``camera``
        are then lists as well, or one focal length or camera for all. Several threads may call it at once.

        Args:
            image: a PIL image, or an array or tensor (H, W, 3) or (3, H, W): uint8, or floating-point from 0 to 1.
            depth: array, tensor or PIL image (H, W) of floating-point metres at the size of the image, 0 where unknown;
                None if there is none. ``malleable.to_metres`` makes metres of counts.
            focal: focal length in pixels of the image, the mean of fx and fy.
            camera: a ``malleable.Camera`` instead, or its numbers by name.
            estimator: a ``malleable.DepthEstimator``, asked for the depth of images that have none; or what makes one,
                a folder or a name on the hub.
            scales, flip, window, overlap: how the image is shown to the network, see ``malleable predict --help``.

        Example:
            >>> prediction = mb.load("runs/x").predict(image, depth, focal=525.0)  # doctest: +SKIP
            >>> prediction.labels, prediction.probabilities, prediction.overlay()  # doctest: +SKIP
        """
        for name, value, example in (("scales", scales, "(0.75, 1.0)"), ("window", window, "(480, 640)")):
            if isinstance(value, int | float):
                raise TypeError(f"{name} must be a sequence such as {example}, got {value}")
        protocol = Protocol(tuple(scales), flip, window, overlap)
        return predict(self.net, self.palette, protocol, image, depth, focal, camera, estimator)


def load_trained(source: str | Path, device: str = "auto", trust: bool = False) -> Trained:
    """Read a network to use, not to train on. Nothing in the files is executed.

    Args:
        source: a checkpoint, a folder of checkpoints (the newest is taken) or a run's folder, a folder with
            model.safetensors and config.json, or hf://owner/name, such a folder on the Hugging Face hub. Of a
            checkpoint the averaged weights are taken if there are any.
        device: ``"auto"`` takes a GPU if there is one.
        trust: build the network also if its code is neither of this library nor of one that it knows, but a
            ``package.module:factory`` that the files name. It is imported then, and may do anything.
    """
    path = locate(source)
    if (path / WEIGHTS).is_file() and (path / FOLDER).is_dir():
        raise ValueError(f"{path} holds a run and {WEIGHTS}; move that file away, or name the run's {path / FOLDER}")
    try:
        trained = _from_shared(path, trust) if (path / WEIGHTS).is_file() else _from_checkpoint(path, trust)
    except Unavailable as error:
        raise Unavailable(f"{source}: {error}") from error
    trained.net.to(choose_device(device)).eval()
    return trained


def locate(source: str | Path, revision: str | None = None) -> Path:
    """Find the file or folder of a network; one on the hub is downloaded, or taken from the cache if it is there."""
    name = str(source)
    if not name.startswith(HUB):
        return Path(source)
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(name.removeprefix(HUB), revision=revision, allow_patterns=list(FILES)))
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{name} has no {WEIGHTS}; files of other formats are not taken, they could run code")
    return folder


def choose_device(device: str) -> torch.device:
    """Find the device that ``"auto"`` or one of torch's names stands for."""
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, and torch must find it, got {device!r}") from error
    return chosen


def _from_checkpoint(path: Path, trust: bool) -> Trained:
    checkpoint = read_checkpoint(path)
    net = build_network(
        checkpoint.config.model,
        len(checkpoint.classes),
        pretrained=False,
        trust=trust,
        places=checkpoint.places,
    )
    net.load_state_dict(checkpoint.ema if checkpoint.ema is not None else checkpoint.model)
    folder = (path.parent if path.is_file() else path).absolute()
    run = folder.parent if folder.resolve().name == FOLDER else folder if (folder / FOLDER).is_dir() else None
    scores = None if run is None else _scores(run / RESULTS)
    return Trained(
        net=net,
        classes=checkpoint.classes,
        palette=checkpoint.palette,
        dataset=checkpoint.dataset,
        step=checkpoint.step,
        config=checkpoint.config,
        run=run,
        scores=scores if scores is not None and scores.step == checkpoint.step else None,
    )


def _scores(path: Path) -> Scores | None:
    """Read the scores of a run; without any, or any that can be read, its network is as good."""
    if not path.is_file():
        return None
    try:
        return Scores.read(path)
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)
        return None


def _from_shared(folder: Path, trust: bool) -> Trained:
    settings = read_json(folder / CONFIG)
    try:
        net = from_settings(settings, trust)
        load_model(net, folder / WEIGHTS)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            about: dict[str, Any] = {key: _value(text) for key, text in (file.metadata() or {}).items()}
    except (SafetensorError, TypeError, RuntimeError) as error:
        raise ValueError(f"{folder} does not hold a network of malleable ({error})") from error
    check_finite(net.state_dict(), folder / WEIGHTS)
    count = net.settings["num_classes"]
    classes, palette, step = about.get("classes"), about.get("palette"), about.get("step")
    return Trained(
        net=net,
        classes=tuple(classes) if _names(classes, count) else tuple(f"class {index}" for index in range(count)),
        palette=default_palette(count) if palette is None else check_palette(palette, count),
        dataset=str(about.get("dataset") or ""),
        step=step if isinstance(step, int) else None,
        scores=None if about.get("scores") is None else Scores.of(about["scores"], folder / WEIGHTS),
    )


def _names(classes: object, count: int) -> TypeGuard[list[str]]:
    return isinstance(classes, list) and len(classes) == count and all(isinstance(name, str) for name in classes)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None  # written by another program
