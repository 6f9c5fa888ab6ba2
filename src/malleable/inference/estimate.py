"""Depth for images of a colour camera alone, from a network that estimates it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torch import Tensor, nn

from malleable.models.summary import is_scale_free

Kind = Literal["metric", "scale", "disparity"]

_MEANING = {
    "metric": "depth in metres",
    "scale": "depth up to an unknown factor",
    "disparity": "disparity up to an unknown factor and shift",
}

# What networks of transformers give, by their type; of Depth Anything the configuration says it.
_KIND_OF_TYPE: dict[str, Kind] = {"depth_pro": "metric", "glpn": "metric", "zoedepth": "metric", "dpt": "disparity"}
_KIND_OF_WORD: dict[str, Kind] = {"metric": "metric", "relative": "disparity"}


class DepthEstimator:
    """Estimates the depth of colour images, and knows what its numbers mean. Nothing in a network's files is executed.

    A disparity up to an unknown shift is no depth, whatever its scale: it is refused unless ``near_far`` says how to
    turn it into one. Several threads may share an estimator; one runs at a time.

    Args:
        model: a folder or a name on the Hugging Face hub for the ``depth-estimation`` pipeline of transformers, or a
            function that gives what that pipeline does for a PIL image: ``{"predicted_depth": (H, W)}``.
        kind: ``"metric"``, ``"scale"`` (depth up to a factor) or ``"disparity"`` (up to a factor and a shift); None if
            the network's configuration tells.
        near_far: depth of the nearest and of the farthest pixel of every image; disparity is linear between the two.
        device: to run on.
    """

    def __init__(
        self,
        model: str | Path | Callable[[Image.Image], Any],
        kind: Kind | None = None,
        near_far: tuple[float, float] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if kind is not None and kind not in get_args(Kind):
            raise ValueError(f"kind must be None or one of {', '.join(map(repr, get_args(Kind)))}, got {kind!r}")
        if near_far is not None:
            try:
                near, far = map(float, near_far)
            except (TypeError, ValueError):
                near, far = 0.0, 0.0
            if not 0 < near < far:
                raise ValueError(f"near_far must be two positive depths, the nearer first, got {near_far}")
            near_far = near, far
        self.name = getattr(model, "__name__", type(model).__name__) if callable(model) else str(model)
        self._pipeline: Any = model if callable(model) else _pipeline(self.name, device)
        self._lock = threading.Lock()
        found = kind or _kind(getattr(self._pipeline, "model", None))
        if found is None:
            raise ValueError(
                f"{self.name} does not say what its numbers are; kind must be one of "
                + ", ".join(f"{word!r} ({meaning})" for word, meaning in _MEANING.items())
            )
        self.kind: Kind = found
        if self.kind == "disparity" and near_far is None:
            raise ValueError(
                f"{self.name} gives {_MEANING[self.kind]}, which is no depth: say how far the nearest and the farthest "
                "pixel are (near_far, --estimate-range), or take a network that estimates depth in metres"
            )
        if self.kind != "disparity" and near_far is not None:
            raise ValueError(f"near_far turns disparity into depth, but {self.name} gives {_MEANING[self.kind]}")
        self.near_far = near_far

    def __str__(self) -> str:
        ends = "" if self.near_far is None else f", taken as {self.near_far[0]:g} to {self.near_far[1]:g} m"
        return f"{self.name}: {_MEANING[self.kind]}{ends}"

    def check(self, net: nn.Module) -> None:
        """Raise unless ``net`` can use this depth."""
        if self.kind == "scale" and not is_scale_free(net):
            raise ValueError(
                f"the network takes metres, but {self.name} gives {_MEANING[self.kind]}; take an estimator of metric "
                "depth, or a network of malleable or 2.5D convolutions, which need no unit"
            )

    def __call__(self, image: Tensor) -> Tensor:
        """Return depth (H, W) float32 of ``image`` (3, H, W) uint8, 0 where the estimate is no positive number."""
        picture = Image.fromarray(image.permute(1, 2, 0).cpu().numpy())
        with self._lock, torch.no_grad():
            found = self._pipeline(picture)
        if not isinstance(found, Mapping) or "predicted_depth" not in found:
            got = f"one with {', '.join(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__
            raise TypeError(f"{self.name} must give a dict with predicted_depth, (H, W), got {got}")
        estimate = torch.as_tensor(found["predicted_depth"])
        estimate = estimate.float().cpu()
        if tuple(estimate.shape) != tuple(image.shape[1:]):
            raise ValueError(f"{self.name} gave depth of {tuple(estimate.shape)} for an image of {tuple(image.shape)}")
        known = estimate[estimate.isfinite()]
        if self.near_far is not None and len(known):
            near, far = self.near_far
            least, most = known.min(), known.max()
            share = (estimate - least) / (most - least).clamp(min=torch.finfo(torch.float32).tiny)
            estimate = 1 / (1 / far + share * (1 / near - 1 / far))
        return torch.where(estimate.isfinite() & (estimate > 0), estimate, 0.0)


def _kind(model: Any) -> Kind | None:
    config = getattr(model, "config", None)
    word = getattr(config, "depth_estimation_type", None)
    return _KIND_OF_WORD.get(word) if word else _KIND_OF_TYPE.get(getattr(config, "model_type", ""))


def _pipeline(model: str, device: torch.device | str) -> Any:
    try:
        from transformers import pipeline
    except ImportError as error:
        raise ValueError("depth estimators need transformers: pip install transformers") from error
    safe = {"use_safetensors": True}  # a pickle could run code
    try:
        return pipeline("depth-estimation", model, device=device, trust_remote_code=False, model_kwargs=safe)
    except Exception as error:  # of foreign files transformers makes errors of any kind
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{model} cannot be used to estimate depth ({type(error).__name__}: {reason})") from error
